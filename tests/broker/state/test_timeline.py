"""Lineages: resume, publish, restart."""

from typing import Any

from slimebus import messages as m


def _three_steps(desk: Any, checkpoint: int) -> list[list[str]]:
    trained = []
    for step in range(3):
        desk.fill(2, version=step)
        trained.append(desk.train(step, checkpoint=min(checkpoint, step)))
    return trained


def test_a_rewind_makes_later_batches_ready_again_and_requeues_what_never_was(desk: Any) -> None:
    trained = _three_steps(desk, checkpoint=1)
    desk.begin(step=1, version=1, lineage="M")
    assert desk.status["step"] == 1
    assert desk.batch(1) == trained[1], "made by version 1, which the checkpoint has had"
    queued = {g.id for g in desk.state.groups.by_id.values() if g.phase == "queued"}
    assert queued == set(trained[2]), "made by version 2 of the abandoned timeline"


def test_a_rewind_ends_the_leases_of_the_old_lineage(desk: Any) -> None:
    (group,) = desk.lease()
    desk.begin(step=0, version=0, lineage="M")
    assert desk.put(group).result == "discarded"
    assert desk.lease(1, lineage="L") == []
    assert desk.lease(1, lineage="M")[0].group == group.group


def test_a_rewind_behind_a_checkpoint_brings_the_freed_prompts_back(desk: Any) -> None:
    trained = _three_steps(desk, checkpoint=2)
    desk.begin(step=0, version=0, lineage="M")
    waiting = {g.id for g in desk.state.groups.by_id.values() if g.phase in ("queued", "ready")}
    assert waiting == {name for groups in trained for name in groups}


def test_a_new_broker_skips_what_a_resumed_trainer_has_trained(new_desk: Any) -> None:
    desk = new_desk()
    desk.begin(step=7, version=7)
    assert desk.lease(1, serving=7)[0].group == "0/14"
    assert desk.status["step"] == 7


def test_resume_repeated_changes_nothing_and_another_step_needs_another_lineage(desk: Any) -> None:
    desk.fill(2)
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L")) == m.Ok()
    assert desk.status["version"] == 0
    assert desk.ask("t", m.Resume(step=3, version=3, lineage="L")).code == "lineage"


def test_versions_follow_each_other_at_the_pace_of_the_rules(desk: Any) -> None:
    assert desk.ask("t", m.Publish(lineage="other", version=0, publishers=[])).code == "lineage"
    assert desk.ask("t", m.Publish(lineage="L", version=2, publishers=[])).code == "version"
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["q"])) == m.Ok()
    assert desk.hints[-1].publishers == ["q"]


def test_the_digest_of_a_version_reaches_whoever_joins_beats_or_listens_and_survives_a_restart(desk: Any) -> None:
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["q"], digest="00ff")) == m.Ok()
    assert desk.hints[-1].digest == "00ff"
    desk.restart()
    assert desk.ask("w9", m.Hello(role="rollout", instance="i")).digest == "00ff"
    desk.begin(step=0, version=0, lineage="M")
    assert desk.state.meta.digest == "", "nothing of the new lineage is published"


def test_a_digest_of_any_length_is_not_stored(desk: Any) -> None:
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["q"], digest="0" * 129)).code == "protocol"


def test_a_restarted_broker_goes_on_where_it_was(desk: Any) -> None:
    desk.fill(3)
    desk.train(0)
    (leased,) = desk.lease(1, serving=1)
    before = desk.status
    desk.restart()
    after = desk.status
    for key in ("step", "version", "lineage", "groups", "lag", "moves", "source"):
        assert after[key] == before[key], key
    assert desk.put(leased, version=1).result == "accepted"
    assert desk.batch(1) == ["0/2", leased.group]


def test_another_run_or_other_data_is_refused_by_the_store(desk: Any) -> None:
    import pytest

    from slimebus.errors import UsageError

    desk.fill(1)
    desk.source.fingerprint = "other numbers"
    with pytest.raises(UsageError, match="prompt data changed"):
        desk.restart()


def test_finish_tells_workers_to_leave_and_the_broker_is_over_when_they_did(desk: Any) -> None:
    assert desk.ask("t", m.Finish()) == m.Ok()
    assert desk.hints[-1].finished
    assert desk.ask("w", m.Heartbeat(lineage="L", serving=0)).finished
    desk.ask("w", m.Goodbye())
    assert not desk.machine.is_over
    desk.ask("t", m.Goodbye())
    assert desk.machine.is_over


def test_samples_of_a_version_that_was_trained_further_than_the_checkpoint_are_requeued(new_desk: Any) -> None:
    """With a publish every two steps, version 0 of a trainer resumed at step 1 holds a step that the next one, back at 0, never had."""
    desk = new_desk(publish_interval=2)
    desk.begin()
    desk.fill(2)
    desk.train(0)
    desk.begin(step=1, version=0, lineage="M")
    desk.fill(2, lineage="M")
    ready = {g.id for g in desk.state.groups.by_id.values() if g.phase == "ready"}
    desk.begin(step=0, version=0, lineage="N")
    assert {g.id for g in desk.state.groups.by_id.values() if g.phase == "queued"} == ready


def test_a_late_repetition_of_an_older_publish_is_acknowledged_and_changes_nothing(desk: Any) -> None:
    desk.fill(2)
    desk.train(0)
    desk.publish(1)
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["old"])) == m.Ok()
    assert (desk.status["version"], desk.state.meta.publishers) == (1, ["p"])

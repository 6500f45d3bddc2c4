"""Lineages: resume, publish, restart."""

from typing import Any

import msgspec
import pytest

from slimebus.bus import messages as m
from slimebus.bus.errors import UsageError


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


def test_a_trainer_that_goes_back_to_any_kept_checkpoint_finds_the_samples(desk: Any) -> None:
    trained = _three_steps(desk, checkpoint=1)
    assert desk.ask("t", m.Commit(step=2, checkpoint=1)) == m.Ok()
    desk.begin(step=2, version=2, lineage="M")
    assert desk.batch(2) == trained[2]
    desk.begin(step=1, version=1, lineage="N")
    assert desk.batch(1) == trained[1]


def test_a_step_behind_the_oldest_kept_checkpoint_is_refused_with_the_reason(desk: Any) -> None:
    _three_steps(desk, checkpoint=2)
    before = desk.status
    refused = desk.ask("t", m.Resume(step=1, version=1, lineage="M"))
    assert (refused.code, "is of step 2" in refused.text) == ("step", True)
    after = desk.status
    for key in ("step", "version", "lineage", "groups", "moves", "source"):
        assert after[key] == before[key], key


@pytest.mark.parametrize("restarts", [False, True])
def test_a_run_begun_anew_samples_every_prompt_of_its_files_again(begun_desk: Any, restarts: bool) -> None:
    desk = begun_desk(prompts=8, max_staleness=4)
    trained = [name for groups in _three_steps(desk, checkpoint=2) for name in groups]
    dropped, leased = desk.lease(2, 3)
    desk.ask("w", m.GiveBack(group=dropped.group, lease=dropped.lease, outcome="drop", reason="x"))
    if restarts:
        desk.restart()
    desk.begin(step=0, version=0, lineage="M")
    assert [g.group for g in desk.lease(9, lineage="M")] == [*trained, dropped.group, leased.group]
    assert desk.status["groups"]["dropped"] == 0
    assert desk.put(leased, 3).result == "discarded"


def test_an_attempt_is_never_numbered_twice(desk: Any) -> None:
    """A field that a consumer puts late names its group and attempt: samples of another attempt must never take it."""
    desk.join("critic", "consumer")
    desk.fill(2)
    desk.train(0, checkpoint=1)
    desk.begin(step=0, version=0, lineage="M")
    again = desk.lease(2, lineage="M")
    assert {g.group for g in again} == {"0/0", "0/1"}
    assert min(g.lease for g in again) > 2
    for group in again:
        desk.put(group, lineage="M")
    assert (
        desk.ask(
            "critic",
            m.PutFields(group="0/0", lease=1),
            bulk=[msgspec.msgpack.encode([m.Field(name="v", dtype="uint8", shapes=[[1]])]), b"x"],
        ).result
        == "gone"
    )


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
    assert desk.ask("t", m.Publish(lineage="other", version=0, publishers=[], digest="d")).code == "lineage"
    assert desk.ask("t", m.Publish(lineage="L", version=2, publishers=["tcp://q:1"], digest="d")).code == "version"
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["tcp://q:1"], digest="d")) == m.Ok()
    assert desk.hints[-1].publishers == ["tcp://q:1"]


def test_the_digest_of_a_version_reaches_whoever_joins_beats_or_listens_and_survives_a_restart(desk: Any) -> None:
    assert desk.ask("t", m.Publish(lineage="L", version=1, publishers=["tcp://q:1"], digest="00ff")) == m.Ok()
    assert desk.hints[-1].digest == "00ff"
    desk.restart()
    assert desk.ask("w9", m.Hello(role="rollout", instance="i")).digest == "00ff"
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert desk.state.meta.digest == "", "nothing of the new lineage is published"


@pytest.mark.parametrize("digest", ["", "0" * 129])
def test_a_version_without_a_digest_or_with_an_endless_one_is_refused(desk: Any, digest: str) -> None:
    before = desk.state.meta.digest
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["tcp://q:1"], digest=digest)).code == "protocol"
    assert desk.state.meta.digest == before


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


@pytest.mark.parametrize(("num_steps", "finished"), [(6, True), (7, False)])
def test_a_finished_run_that_is_started_again_is_finished_unless_it_has_more_steps(begun_desk: Any, num_steps: int, finished: bool) -> None:
    """A worker that joins before the trainer would leave, and the trainer would wait for ever."""
    desk = begun_desk(num_steps=6)
    desk.ask("t", m.Finish())
    desk.rules = msgspec.structs.replace(desk.rules, num_steps=num_steps)
    desk.restart()
    assert desk.ask("w", m.Heartbeat(lineage="L", serving=0)).finished == finished
    assert desk.machine.state.is_finished == finished


def test_samples_of_a_version_that_was_trained_further_than_the_checkpoint_are_requeued(begun_desk: Any) -> None:
    """With a publish every two steps, version 0 of a trainer resumed at step 1 holds a step that the next one, back at 0, never had."""
    desk = begun_desk(publish_interval=2)
    desk.fill(2)
    desk.train(0)
    desk.begin(step=1, version=0, lineage="M")
    desk.fill(2, lineage="M")
    ready = {g.id for g in desk.state.groups.by_id.values() if g.phase == "ready"}
    desk.begin(step=0, version=0, lineage="N")
    assert {g.id for g in desk.state.groups.by_id.values() if g.phase == "queued"} == ready


@pytest.mark.parametrize("is_committed", [False, True])
@pytest.mark.parametrize("restarts", [False, True])
def test_steps_that_another_trainer_trained_in_its_place_are_not_taken_for_those_of_a_checkpoint(
    desk: Any, is_committed: bool, restarts: bool
) -> None:
    """One trainer saved step 2; another had read step 1 before that, resumed later, and is gone; the first goes on from its checkpoint."""
    mine = _three_steps(desk, checkpoint=0)[:2]
    desk.begin(step=1, version=1, lineage="M")
    theirs = desk.batch(1)
    desk.ask("t", m.Reject(step=1, groups={theirs[0]: "luck"}))
    (other,) = desk.fill(1, version=1, lineage="M")
    assert set(desk.batch(1)) == {theirs[1], other}
    if is_committed:
        desk.train(1, lineage="M")
        desk.fill(1, version=2, lineage="M")
    if restarts:
        desk.restart()
    assert desk.ask("t", m.Resume(step=2, version=2, lineage="N", parent="L")) == m.Ok()
    phases = {group.id: (group.phase, group.newest_version) for group in desk.state.groups.by_id.values() if group.phase != "queued"}
    assert phases == {**dict.fromkeys(mine[0], ("committed", 0)), theirs[1]: ("ready", 1), other: ("ready", 1)}, "nothing of theirs is lost"
    assert "no record of 1 of the trained steps; up to 2 prompts may be trained twice" in desk.notes[-2]


def test_a_run_that_began_anew_skips_no_prompt_for_the_trainer_of_the_steps_before(desk: Any) -> None:
    _three_steps(desk, checkpoint=2)
    desk.join("t", "trainer", instance="2")
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    desk.join("t", "trainer", instance="3")
    assert desk.ask("t", m.Resume(step=3, version=3, lineage="N", parent="L")) == m.Ok()
    assert desk.state.meta.cursor == 0
    assert "no record of 3 of the trained steps; up to 6 prompts may be trained twice" in desk.notes[-2]


def test_a_checkpoint_of_an_older_lineage_is_taken_as_it_is_where_nobody_went_back_behind_it(desk: Any) -> None:
    trained = _three_steps(desk, checkpoint=0)
    desk.begin(step=3, version=3, lineage="M")
    assert desk.ask("t", m.Resume(step=2, version=2, lineage="N", parent="L")) == m.Ok()
    committed = {group.id for group in desk.state.groups.by_id.values() if group.phase == "committed"}
    assert committed == {*trained[0], *trained[1]}
    assert not any("no record" in note for note in desk.notes)


def test_a_late_repetition_of_an_older_publish_is_acknowledged_and_changes_nothing(desk: Any) -> None:
    desk.fill(2)
    desk.train(0)
    desk.publish(1)
    assert desk.ask("t", m.Publish(lineage="L", version=0, publishers=["tcp://old:1"], digest="d")) == m.Ok()
    assert (desk.status["version"], desk.state.meta.publishers) == (1, ["tcp://p:1"])


def test_the_first_publish_of_a_timeline_is_the_version_that_it_resumed_with(desk: Any) -> None:
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert desk.ask("t", m.Publish(lineage="M", version=1, publishers=["tcp://p:1"], digest="d")).code == "version"
    desk.publish(0, "M")


def test_a_lineage_is_begun_once(desk: Any) -> None:
    desk.fill(2)
    desk.train(0)
    desk.join("t", "trainer", "2")
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L")).code == "lineage"
    assert desk.ask("t", m.Resume(step=1, version=1, lineage="M")) == m.Ok()
    desk.join("t", "trainer", "3")
    assert desk.ask("t", m.Resume(step=0, version=0, lineage="L")).code == "lineage"


def test_a_resume_repeated_after_its_steps_are_freed_is_acknowledged(desk: Any) -> None:
    desk.begin(step=1, version=1, lineage="M")
    desk.fill(2, 1, "M")
    desk.train(1, checkpoint=2, lineage="M")
    assert desk.ask("t", m.Resume(step=1, version=1, lineage="M")) == m.Ok()
    assert desk.status["step"] == 2


@pytest.mark.parametrize("order", ["worker", "trainer"])
def test_a_finished_run_that_is_extended_goes_on_in_whatever_order_its_processes_come_back(begun_desk: Any, order: str) -> None:
    desk = begun_desk(num_steps=1)
    desk.fill(2)
    desk.train(0, checkpoint=1)
    assert desk.ask("t", m.Finish()) == m.Ok()
    for name in ("w", "t"):
        desk.ask(name, m.Goodbye())
    desk.rules = msgspec.structs.replace(desk.rules, num_steps=2)
    desk.restart()
    desk.epochs.clear()
    if order == "worker":
        desk.join("w", "rollout", "2")
        assert not desk.ask("w", m.Heartbeat()).finished
    desk.join("t", "trainer", "2")
    if order == "trainer":
        desk.join("w", "rollout", "2")
    desk.begin(step=1, version=1, lineage="M")
    desk.fill(2, 1, "M")
    assert desk.train(1, lineage="M")


@pytest.mark.parametrize("num_steps", [1, None])
def test_a_finished_run_that_is_started_again_with_nothing_to_do_stays_finished(begun_desk: Any, num_steps: int | None) -> None:
    desk = begun_desk(prompts=2, num_steps=num_steps)
    desk.fill(2)
    desk.train(0)
    assert desk.ask("t", m.Finish()) == m.Ok()
    desk.restart()
    assert desk.ask("w", m.Heartbeat()).finished


def test_a_trainer_that_begins_at_0_where_the_run_was_further_is_warned_of(desk: Any) -> None:
    _three_steps(desk, checkpoint=0)
    desk.begin(step=0, version=0, lineage="a\0b\n\x1b[31m")
    assert any("it trains from step 0, and 3 steps of this run are lost" in note for note in desk.notes)
    assert all(note.isprintable() for note in desk.notes), "what a peer says is one line without control characters"


def test_a_run_that_its_trainer_left_waits_for_one(desk: Any) -> None:
    assert desk.status["state"] == "running"
    desk.ask("t", m.Goodbye())
    assert desk.status["state"] == "waiting for a trainer"
    assert "everyone waits for a trainer to join" in desk.status["waiting"]


def test_a_resume_behind_the_end_of_the_run_is_refused(begun_desk: Any) -> None:
    desk = begun_desk(num_steps=5)
    refused = desk.ask("t", m.Resume(step=1 << 30, version=0, lineage="M"))
    assert (refused.code, "of a run of 5 steps" in refused.text) == ("step", True)
    assert desk.ask("t", m.Resume(step=5, version=5, lineage="M")) == m.Ok()


def test_a_version_has_one_digest(desk: Any) -> None:
    refused = desk.ask("t", m.Publish(lineage="L", version=0, publishers=["tcp://p:1"], digest="another"))
    assert (refused.code, desk.state.meta.digest) == ("version", "d")


@pytest.mark.parametrize("publishers", [[], ["not an address"], ["tcp://h:1", "tcp://" + 2000 * "h" + ":1"], ["tcp://h:1?\x1b]0;x"]])
def test_a_publish_that_names_no_weight_server_is_refused(desk: Any, publishers: list[str]) -> None:
    refused = desk.ask("t", m.Publish(lineage="L", version=1, publishers=publishers, digest="d"))
    assert (refused.code, desk.state.meta.version) == ("protocol", 0)


@pytest.mark.parametrize("address", ["tcp://h:1", "tcp://[::1]:1?key=abc", "file:///runs/a/weights"])
def test_every_kind_of_weight_server_can_be_published(desk: Any, address: str) -> None:
    assert desk.ask("t", m.Publish(lineage="L", version=1, publishers=[address], digest="d")) == m.Ok()

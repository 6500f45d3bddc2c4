"""Batches, staleness at hand-out, commits."""

import math
from typing import Any

import pytest
from made_samples import frames, made

from broker.state import batches
from slimebus.bus import messages as m

PHASES = ("queued", "leased", "ready", "assigned", "committed")


def test_a_batch_is_first_in_first_out_and_the_same_until_it_is_committed(desk: Any) -> None:
    groups = desk.lease(4)
    for group in (groups[3], groups[1], groups[2]):
        desk.put(group)
    assert desk.batch(0) == desk.batch(0) == ["0/1", "0/2"]
    desk.put(groups[0])
    assert desk.batch(1) == ["0/0", "0/3"]


def test_a_batch_waits_and_is_answered_by_the_put_that_fills_it(desk: Any) -> None:
    number = desk.send("t", m.Batch(step=0, wait_s=30.0))
    desk.fill(1)
    assert number not in desk.answers
    desk.fill(1)
    assert len(desk.answers[number].groups) == 2


def test_a_batch_that_is_not_ready_says_who_waits_for_whom(desk: Any) -> None:
    desk.fill(1)
    desk.lease(1)
    desk.now += 94
    reason = desk.ask("t", m.Batch(step=0, wait_s=0.0)).reason
    assert reason == "trainer waits for batch 0: 1 of 2 groups ready; 1 leased by w, silent for 94 s"


def test_the_next_step_can_be_asked_for_ahead(desk: Any) -> None:
    desk.fill(4)
    ahead = desk.send("t", m.Batch(step=1, wait_s=30.0))
    assert ahead not in desk.answers
    assert desk.batch(0) == ["0/0", "0/1"]
    assert [g.group for g in desk.answers[ahead].groups] == ["0/2", "0/3"]
    assert desk.answers[ahead].version == 1


def test_what_grew_too_old_is_requeued_or_dropped_and_never_handed_out(begun_desk: Any) -> None:
    for on_stale, phase in (("requeue", "queued"), ("drop", "dropped")):
        desk = begun_desk(on_stale=on_stale)
        slow = desk.lease(1)[0]
        for step in range(2):
            desk.fill(2, version=step)
            desk.train(step)
        assert desk.put(slow, version=0).result == "accepted"
        assert desk.status["groups"][phase] == 1
        assert desk.status["waste"]["stale"] == {"groups": 1, "tokens": 4}
        assert desk.store.get("payloads", slow.group) is None


def test_the_bound_speaks_of_the_oldest_trainable_token(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=1)
    (group,) = desk.lease(1)
    for step in range(2):
        desk.fill(2, version=step)
        desk.train(step)
    put = m.Put(group=group.group, lease=group.lease, lineage="L")
    desk.ask("w", put, bulk=frames(made((0, 1), (2, 3))))
    assert desk.status["groups"]["ready"] == 0


def test_commit_is_idempotent_counts_lag_and_frees_under_a_checkpoint(desk: Any) -> None:
    desk.fill(4)
    assert desk.train(0) == ["0/0", "0/1"]
    assert desk.train(1, checkpoint=1) == ["0/2", "0/3"]
    assert desk.ask("t", m.Commit(step=0, checkpoint=2)) == m.Ok()
    assert desk.status["groups"]["committed"] == 2, "a repeat frees nothing more"
    assert desk.status["lag"] == {"mean": 0.5, "max": 1, "groups": 4, "histogram": {"0": 2, "1": 2}}
    assert [key for key, _ in desk.store.scan("payloads")] == ["0/2", "0/3"]
    assert [row["step"] for row in desk.rows] == [0, 1]


def test_samples_under_a_checkpoint_are_freed_in_several_turns_also_after_a_restart(new_desk: Any) -> None:
    desk = new_desk(max_freed_bytes=1)
    desk.begin()
    desk.fill(4)
    desk.train(0)
    desk.train(1, checkpoint=2)
    assert desk.status["groups"]["committed"] == 3, "the commit frees the first group"
    for left in (2, 1, 0):
        assert desk.machine.next_deadline() <= desk.now + batches.FREE_PAUSE_S
        if left == 1:
            desk.restart()
        desk.pass_time(batches.FREE_PAUSE_S)
        assert desk.status["groups"]["committed"] == left
    desk.pass_time(batches.FREE_PAUSE_S)
    assert [*desk.store.scan("payloads"), *desk.store.scan("prompts"), *desk.store.scan("steps")] == []
    assert desk.machine.next_deadline() > desk.now + batches.FREE_PAUSE_S


def test_a_trainer_that_resumes_finds_all_freed_that_its_checkpoint_lets_go(new_desk: Any) -> None:
    desk = new_desk(max_freed_bytes=1)
    desk.begin()
    desk.fill(4)
    desk.train(0)
    desk.train(1, checkpoint=2)
    assert desk.ask("t", m.Resume(step=2, version=2, lineage="M", parent="L")) == m.Ok()
    assert desk.status["groups"]["committed"] == 0
    assert [*desk.store.scan("payloads"), *desk.store.scan("steps")] == []


def test_a_commit_tells_how_its_groups_came_to_be_trained_and_forgets_it(desk: Any) -> None:
    first, second = desk.lease(2)
    desk.now += 1
    desk.ask("w", m.GiveBack(group=first.group, lease=first.lease, outcome="requeue", reason="r"))
    (again,) = desk.lease(1)
    desk.now += 2
    for group in (again, second):
        desk.put(group)
    desk.now += 3
    assert len(desk.batch(0)) == 2
    desk.now += 4
    assert desk.ask("t", m.Commit(step=0, metrics={"train_s": 2.5, "publish_s": 0.5, "save_s": 0.25, "approx_kl": math.inf})) == m.Ok()
    assert desk.rows[-1]["metrics"] == desk.status["steps"][-1]["metrics"] == {"train_s": 2.5, "publish_s": 0.5, "save_s": 0.25}
    (lives,) = desk.step_histories
    assert (lives.step, lives.now, lives.train_s, lives.after_s) == (0, 110.0, 2.5, 0.75)
    assert lives.groups[second.group] == (
        second.num_samples,
        [("queued", 100.0), ("leased", 100.0), ("ready", 103.0), ("assigned", 106.0), ("committed", 110.0)],
    )
    assert [phase for phase, _ in lives.groups[first.group][1]] == ["queued", "leased", "queued", "leased", *PHASES[2:]]
    assert not desk.state.phase_history


def test_of_a_group_that_ended_nothing_is_kept_in_mind(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=1)
    dead, dropped = desk.lease(2)
    desk.ask("w", m.GiveBack(group=dead.group, lease=dead.lease, outcome="fail", reason="r"))
    desk.ask("w", m.GiveBack(group=dropped.group, lease=dropped.lease, outcome="drop", reason="r"))
    assert not desk.state.phase_history


def test_commits_out_of_order_are_refused(desk: Any) -> None:
    desk.fill(4)
    assert desk.ask("t", m.Commit(step=0)).code == "step"
    desk.batch(0)
    desk.batch(1)
    assert desk.ask("t", m.Commit(step=1)).code == "step"
    desk.train(0)
    assert desk.ask("t", m.Batch(step=0, wait_s=0.0)).code == "step"


def test_only_groups_of_a_batch_can_be_fetched(desk: Any) -> None:
    desk.fill(2)
    assert desk.ask("t", m.Fetch(groups=["0/0"])).code == "not_assigned"
    desk.batch(0)
    assert desk.ask("t", m.Fetch(groups=["0/1", "0/0"])).num_frames == [4, 4]


def test_the_end_of_the_source_ends_the_last_batch(begun_desk: Any) -> None:
    desk = begun_desk(prompts=3)
    desk.fill(3)
    desk.train(0)
    refused = desk.ask("t", m.Batch(step=1, wait_s=0.0))
    assert refused.code == "source_ended"
    assert desk.status["groups"]["dropped"] == 1


def test_a_newer_request_for_the_same_step_answers_the_older_one(desk: Any) -> None:
    """A late copy of a request that is long answered must not keep the living one waiting."""
    living = desk.send("t", m.Batch(step=0, wait_s=60.0))
    late = desk.send("t", m.Batch(step=0, wait_s=60.0))
    assert desk.answers[living].groups == []
    assert late not in desk.answers
    desk.fill(2)
    assert len(desk.answers[late].groups) == 2


def test_a_trainer_that_has_committed_more_than_the_broker_knows_is_told(desk: Any) -> None:
    desk.fill(2)
    reply = desk.ask("t", m.Batch(step=3, wait_s=5.0, trained=2))
    assert (reply.code, "before 2, this broker knows of those before 0" in reply.text) == ("step", True)
    assert desk.ask("t", m.Batch(step=0, wait_s=5.0)).groups


def test_samples_of_trained_steps_count_in_the_status_and_too_many_are_told(desk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WARN_KEPT_STEPS", 2)
    for step in range(5):
        desk.fill(2, step)
        if step < 4:
            desk.train(step)
    groups = desk.status["groups"]
    assert groups["committed"] == 8
    assert groups["committed_bytes"] == sum(g.size_bytes for g in desk.state.groups.by_id.values() if g.phase == "committed") > 0
    assert [note[:31] for note in desk.notes if "trained steps" in note] == [f"the samples of {n} trained steps "[:31] for n in (2, 4)]
    desk.train(4, checkpoint=5)
    assert desk.status["groups"]["committed_bytes"] == 0


def test_a_trainer_that_asks_for_more_steps_than_may_wait_is_told_busy(begun_desk: Any) -> None:
    desk = begun_desk(max_parked_per_client=4)
    waiting = [desk.send("t", m.Batch(step=step, wait_s=60.0)) for step in range(4)]
    refused = desk.ask("t", m.Batch(step=4, wait_s=60.0))
    assert (refused.code, refused.retryable) == ("busy", True)
    assert "4 batch requests of t wait already" in refused.text
    assert desk.ask("t", m.Batch(step=3, wait_s=60.0), request=waiting[3]) is None, "a repeat of one that waits goes on waiting"
    desk.fill(2)
    assert waiting[0] in desk.answers
    assert desk.ask("t", m.Batch(step=4, wait_s=60.0)) is None, "there is room again"


def test_a_fetch_and_a_read_hold_the_groups_that_fit_and_the_rest_come_when_asked_again(new_desk: Any) -> None:
    desk = new_desk(batch_size=4, samples_per_prompt=1)
    desk.state.max_message_bytes = 256 << 20
    desk.begin()
    desk.join("critic", "consumer")
    for group, num_tokens in zip(desk.lease(4), (3_000_000, 3_000_000, 8_000_000, 10), strict=True):  # 9 B a token; 64 MiB fit
        put = m.Put(group=group.group, lease=group.lease, lineage="L")
        answer = desk.ask("w", put, bulk=frames(*[made((0, num_tokens // group.num_samples))] * group.num_samples))
        assert isinstance(answer, m.PutReply), answer
    wanted, pages = desk.batch(0), []
    while wanted:
        pages.append(len(desk.ask("t", m.Fetch(groups=wanted)).num_frames))
        wanted = wanted[pages[-1] :]
    assert pages == [2, 1, 1], "a group larger than an answer comes alone"
    position, read = 0, []
    while groups := desk.ask("critic", m.Read(count=64, wait_s=0.0, after=position)).groups:
        read.append(len(groups))
        position = groups[-1].position
    assert read == [2, 1, 1]


def test_a_commit_repeated_after_a_restart_of_the_broker_is_acknowledged_and_changes_nothing(desk: Any) -> None:
    desk.fill(2)
    desk.train(0, checkpoint=1)
    desk.fill(2, 1)
    before = [desk.status[name] for name in ("step", "groups", "moves", "lag")]
    desk.restart()
    for _ in range(2):
        assert desk.ask("t", m.Commit(step=0, checkpoint=1, unused={"0/0": "again"})) == m.Ok()
    assert [desk.status[name] for name in ("step", "groups", "moves", "lag")] == before
    assert not [reason for reason in desk.status["counted"] if "again" in reason]
    assert desk.batch(1)


LINES = "a\nb\x1b[31m\u2028" + "x" * 10_000


def test_text_of_a_peer_is_one_bounded_printable_line_wherever_it_is_kept_or_told(desk: Any) -> None:
    one, two, three = desk.lease(3)
    desk.ask("w", m.GiveBack(group=one.group, lease=one.lease, outcome="fail", reason=LINES))
    desk.put(two)
    desk.put(three)
    desk.batch(0)
    desk.ask("t", m.Reject(step=0, groups={two.group: LINES}))
    desk.fill(1)
    desk.batch(0)
    desk.publish(1)
    desk.ask("t", m.Commit(step=0, unused={three.group: LINES}))
    desk.ask("c", m.Edit(action="drop", groups=[two.group], reason=LINES), run="")
    refused = desk.ask("t", m.Publish(lineage="a\nb", version=1, publishers=[], digest="d"))
    desk.ask("t", m.Finish(reason=LINES))
    kept = [group.reason for group in desk.state.groups.by_id.values()] + list(desk.notes)
    kept += [*desk.status["moves"], *desk.status["counted"], *desk.status["waste"], refused.text]
    assert [text for text in kept if not text.isprintable() or len(text) > 5000] == []
    assert any("a\\nb" in text for text in desk.status["counted"])

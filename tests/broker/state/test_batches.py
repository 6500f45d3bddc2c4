"""Batches, staleness at hand-out, commits."""

from typing import Any

import msgspec

from slimebus import messages as m


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


def test_what_grew_too_old_is_requeued_or_dropped_and_never_handed_out(new_desk: Any) -> None:
    for on_stale, phase in (("requeue", "queued"), ("drop", "dropped")):
        desk = new_desk(on_stale=on_stale)
        desk.begin()
        slow = desk.lease(1)[0]
        for step in range(2):
            desk.fill(2, version=step)
            desk.train(step)
        assert desk.put(slow, version=0).result == "accepted"
        assert desk.status["groups"][phase] == 1
        assert desk.status["waste"]["stale"] == {"groups": 1, "tokens": 4}
        assert desk.store.get("payloads", slow.group) is None


def test_waiting_holds_the_batch_for_the_group_that_would_grow_too_old(new_desk: Any) -> None:
    desk = new_desk(on_stale="wait", max_staleness=1)
    desk.begin()
    slow = desk.lease(1)[0]
    desk.fill(2)
    desk.train(0)
    desk.fill(2, version=1)
    assert desk.batch(1) == [], "version 0 is fresh enough in step 1 for the last time"
    desk.put(slow, version=0)
    assert slow.group in desk.batch(1)


def test_the_bound_speaks_of_the_oldest_trainable_token(new_desk: Any) -> None:
    desk = new_desk(max_staleness=1)
    desk.begin()
    (group,) = desk.lease(1)
    for step in range(2):
        desk.fill(2, version=step)
        desk.train(step)
    header = m.SampleHeader(num_tokens=4, num_trainable=4, versions=[(0, 1), (2, 3)], oldest_version=0, reward=1.0)
    desk.ask("w", m.Put(group=group.group, lease=group.lease, attempt=1, lineage="L", samples=[header], fields=[]))
    assert desk.status["groups"]["ready"] == 0


def test_commit_is_idempotent_counts_lag_and_frees_under_a_checkpoint(desk: Any) -> None:
    desk.fill(4)
    assert desk.train(0) == ["0/0", "0/1"]
    assert desk.train(1) == ["0/2", "0/3"]
    assert desk.ask("t", m.Commit(step=0, checkpoint=1)) == m.Ok()
    assert desk.status["groups"]["committed"] == 2
    assert desk.status["lag"] == {"mean": 0.5, "max": 1, "groups": 4, "histogram": {"0": 2, "1": 2}}
    assert [key for key, _ in desk.store.scan("payloads")] == ["0/2", "0/3"]
    assert [row["step"] for row in desk.rows] == [0, 1]


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
    assert desk.ask("t", m.Fetch(groups=["0/1", "0/0"])).num_frames == [1, 1]


def test_the_end_of_the_source_ends_the_last_batch(new_desk: Any) -> None:
    desk = new_desk(prompts=3)
    desk.begin()
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


def test_nobody_is_waited_for_when_nobody_makes_anything(new_desk: Any) -> None:
    """`wait` holds a batch back for groups in flight; what is ready and too much for its last step holds back nothing."""
    desk = new_desk(on_stale="wait", max_staleness=0, batch_size=2)
    desk.begin()
    desk.fill(2)
    desk.state.rules = msgspec.structs.replace(desk.state.rules, batch_size=1)  # the second group would be too old for step 1
    assert len(desk.batch(0)) == 1


def test_a_trainer_that_has_committed_more_than_the_broker_knows_is_told(desk: Any) -> None:
    desk.fill(2)
    reply = desk.ask("t", m.Batch(step=3, wait_s=5.0, trained=2))
    assert (reply.code, "before 2, this broker knows of those before 0" in reply.text) == ("step", True)
    assert desk.ask("t", m.Batch(step=0, wait_s=5.0)).groups

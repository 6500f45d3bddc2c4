"""Leases, puts and what happens to them."""

from typing import Any

import pytest
from made_samples import frames, made

from broker.state.groups import field_key
from slimebus.bus import messages as m


def test_a_group_is_leased_with_its_prompt_number_and_sampling(begun_desk: Any) -> None:
    desk = begun_desk(samples_per_prompt=4, sampling={"temperature": 0.7})
    (group,) = desk.lease()
    assert (group.group, group.lease, group.num_samples, group.kind) == ("0/0", 1, 4, "train")
    assert group.sampling == {"temperature": 0.7}


def test_the_same_lease_request_gets_the_same_groups_again(desk: Any) -> None:
    ask = m.Lease(want=2, wait_s=0.0, lineage="L", serving=0)
    first = desk.ask("w", ask, request=77)
    assert desk.ask("w", ask, request=77).groups == first.groups
    assert desk.status["groups"]["leased"] == 2


def test_an_expired_lease_requeues_the_group_and_its_late_put_is_discarded(desk: Any) -> None:
    (group,) = desk.lease()
    desk.pass_time(10.5)
    assert desk.status["groups"]["queued"] == 1
    assert desk.put(group).result == "discarded"
    (again,) = desk.lease()
    assert (again.group, again.lease) == (group.group, 2)
    assert desk.status["waste"] == {"put after the lease was lost": {"groups": 1, "tokens": 4}}


def test_a_lease_that_its_worker_never_named_expires_by_itself_and_no_other_is_said_to(desk: Any) -> None:
    (named,) = desk.lease()
    desk.ask("w", m.Heartbeat(lineage="L", serving=0, leases=[named.lease]))
    desk.pass_time(5.0)
    (unnamed,) = desk.lease()
    assert desk.put(named).result == "accepted"
    desk.pass_time(6.0)
    assert desk.status["groups"]["leased"] == 1
    desk.pass_time(5.0)
    assert desk.status["groups"]["leased"] == 0
    assert [note for note in desk.notes if "expired" in note] == [f"lease of group {unnamed.group} by w expired"]


def test_a_heartbeat_that_lists_a_lease_keeps_it_and_names_lost_ones(desk: Any) -> None:
    kept, expired = desk.lease(2)
    for _ in range(4):
        desk.pass_time(4.0)
        reply = desk.ask("w", m.Heartbeat(lineage="L", serving=0, leases=[kept.lease]))
    assert reply.lost == []
    assert desk.put(kept).result == "accepted"
    reply = desk.ask("w", m.Heartbeat(lineage="L", serving=0, leases=[expired.lease]))
    assert reply.lost == [expired.lease]


def test_a_second_put_of_an_attempt_is_a_duplicate(desk: Any) -> None:
    (group,) = desk.lease()
    assert [desk.put(group).result, desk.put(group).result] == ["accepted", "duplicate"]
    assert desk.status["groups"]["ready"] == 1


def test_a_put_of_a_worker_that_does_not_hold_the_lease_is_discarded(desk: Any) -> None:
    desk.join("w2", "rollout")
    (group,) = desk.lease()
    assert desk.put(group, name="w2").result == "discarded"
    assert desk.put(group).result == "accepted"


def test_failed_samples_are_left_out_and_counted(desk: Any) -> None:
    (group,) = desk.lease()
    assert desk.put(group, rewards=(1.0, None, None, 0.0)).result == "accepted"
    held = desk.state.groups.by_id[group.group]
    assert (held.num_samples, held.num_failed, held.num_tokens) == (2, 2, 8)
    assert desk.status["counted"]["samples failed"] == 2
    assert desk.status["waste"] == {"failed samples": {"groups": 0, "tokens": 8}}


def test_a_group_whose_samples_all_failed_is_tried_again_and_then_dead(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=2)
    for attempt in (1, 2):
        (group,) = desk.lease()
        assert (group.group, group.lease) == ("0/0", attempt)
        desk.put(group, rewards=(None,))
    assert desk.status["groups"]["dead"] == 1
    assert desk.lease()[0].group == "0/1"
    assert [key for key, _ in desk.store.scan("ended")] == ["0/0"]
    assert desk.store.get("prompts", "0/0") == b"\xa6prompt", "a dead group can be replayed"


def test_give_back_requeues_drops_or_fails(desk: Any) -> None:
    for outcome, phase in (("requeue", "queued"), ("drop", "dropped"), ("fail", "queued")):
        (group,) = desk.lease()
        back = m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="why", num_tokens=7)
        assert desk.ask("w", back) == m.Ok()
        assert desk.ask("w", back) == m.Ok(), "a repeat is acknowledged"
        assert desk.status["groups"][phase] == 1
    assert desk.status["moves"]["leased>dropped returned: why"] == 1
    assert {why: waste["tokens"] for why, waste in desk.status["waste"].items()} == {"returned: why": 14, "failed attempts": 7}


def test_goodbye_returns_leases_at_once(desk: Any) -> None:
    desk.lease(2)
    assert desk.ask("w", m.Goodbye()) == m.Ok()
    assert desk.status["groups"]["queued"] == 2


def test_a_parked_request_is_answered_when_its_wait_runs_out_and_says_why(desk: Any) -> None:
    desk.lease(4)
    number = desk.send("w", m.Lease(want=1, wait_s=5.0, lineage="L", serving=0))
    assert number not in desk.answers
    desk.pass_time(5.0)
    reply = desk.answers[number]
    assert reply.groups == []
    assert "waiting for the trainer to publish version 1" in reply.reason


def test_capacity_is_dealt_around_the_waiting_workers(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=float("inf"), buffer_capacity=4)
    desk.join("w2", "rollout")
    desk.fill(4)
    numbers = [desk.send(name, m.Lease(want=4, wait_s=30.0, lineage="L", serving=0)) for name in ("w", "w2")]
    desk.train(0)
    assert [len(desk.answers[number].groups) for number in numbers] == [1, 1]


def test_too_many_parked_requests_are_refused_as_busy(begun_desk: Any) -> None:
    desk = begun_desk(max_parked=1)
    desk.lease(4)
    desk.send("w", m.Lease(want=1, wait_s=5.0, lineage="L", serving=0))
    refused = desk.ask("w", m.Lease(want=1, wait_s=5.0, lineage="L", serving=0))
    assert (refused.code, refused.retryable) == ("busy", True)


def test_tokens_of_a_version_that_was_never_published_are_refused(desk: Any) -> None:
    (group,) = desk.lease()
    assert "0 is the newest published" in desk.put(group, version=3).text


def test_a_burst_of_lease_requests_is_dealt_by_what_each_worker_serves(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=0)
    for name in ("w2", "w3"):
        desk.join(name, "rollout")
    desk.fill(2)
    desk.train(0)  # version 1 is out; w still serves 0
    asked = {"w": 0, "w2": 1, "w3": 0}
    with desk.burst():
        numbers = {name: desk.send(name, m.Lease(want=1, wait_s=5.0, lineage="L", serving=serving)) for name, serving in asked.items()}
    assert [name for name in asked if numbers[name] in desk.answers] == ["w2"]
    assert {name for name, _ in desk.state.waiting_leases} == {"w", "w3"}
    desk.pass_time(5.5)
    assert "more than 0 ahead of the served version 0" in desk.answers[numbers["w"]].reason


def test_a_put_that_comes_again_is_counted_once_whatever_became_of_its_group(begun_desk: Any) -> None:
    desk = begun_desk(needs_spread=True, samples_per_prompt=2)
    filtered, late = desk.lease(2)
    assert desk.put(filtered, rewards=(1.0, 1.0)).result == "accepted"
    assert desk.put(filtered, rewards=(1.0, 1.0)).result == "duplicate", "its group is gone"
    desk.pass_time(11.0)
    assert [desk.put(late, rewards=(1.0, 0.0)).result for _ in range(2)] == ["discarded", "discarded"]
    assert desk.status["waste"] == {
        "filtered: no reward spread": {"groups": 1, "tokens": 8},
        "put after the lease was lost": {"groups": 1, "tokens": 8},
    }


def test_a_repeated_put_of_a_group_that_is_leased_again_is_a_duplicate(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=1)
    slow = desk.lease(1)[0]
    for step in range(2):
        desk.fill(2, version=step)
        desk.train(step)
    assert desk.put(slow).result == "accepted"
    again = desk.lease(1, serving=2)[0]
    assert again.group == slow.group
    desk.state.leases.results.clear()  # as after a restart
    assert desk.put(slow).result == "duplicate"
    assert desk.put(again, version=2).result == "accepted"


def test_a_burst_of_requests_that_can_be_met_is_not_too_many_to_park(begun_desk: Any) -> None:
    desk = begun_desk(max_parked=1, max_staleness=4)
    for name in ("w2", "w3"):
        desk.join(name, "rollout")
    ask = m.Lease(want=1, wait_s=5.0, lineage="L", serving=0)
    with desk.burst():
        numbers = [desk.send(name, ask) for name in ("w", "w2", "w3")]
    assert [len(desk.answers[number].groups) for number in numbers] == [1, 1, 1]
    assert not desk.state.waiting_leases


def test_a_burst_of_one_worker_that_can_be_met_is_not_too_much_of_it(begun_desk: Any) -> None:
    desk = begun_desk(max_parked_per_client=1, max_staleness=16)
    ask = m.Lease(want=1, wait_s=5.0, lineage="L", serving=0)
    with desk.burst():
        numbers = [desk.send("w", ask) for _ in range(12)]
    assert [len(desk.answers[number].groups) for number in numbers] == [1] * len(numbers)


def test_a_put_that_nobody_could_train_is_a_failed_attempt_and_names_group_and_worker(begun_desk: Any) -> None:
    desk = begun_desk(max_attempts=2)
    for attempt in (1, 2):
        (group,) = desk.lease()
        assert (group.group, group.lease) == ("0/0", attempt)
        put = m.Put(group=group.group, lease=group.lease, lineage="L")
        refused = desk.ask("w", put, bulk=frames(made((0, 4)), made((0, 4))))
        assert refused.code == "bad_samples"
        assert refused.text.startswith("put of group 0/0 by w: 2 samples of 2 attempts")
        assert desk.ask("w", put, bulk=frames(made((0, 4)))).result == "discarded", "the lease has ended"
    assert desk.status["groups"]["dead"] == 1
    assert any("put of group 0/0 by w" in note for note in desk.notes)


def test_a_bad_put_of_another_worker_ends_no_lease(desk: Any) -> None:
    desk.join("w2", "rollout")
    (group,) = desk.lease()
    put = m.Put(group=group.group, lease=group.lease, lineage="L")
    assert desk.ask("w2", put, bulk=[b"junk"]).code == "bad_samples"
    assert desk.put(group).result == "accepted"


def test_a_put_of_another_lineage_ends_its_lease(desk: Any) -> None:
    (group,) = desk.lease()
    assert desk.put(group, lineage="other").result == "discarded"
    assert (desk.status["groups"]["leased"], desk.state.groups.by_id["0/0"].failures) == (0, 1)


def test_the_oldest_version_is_that_of_the_trained_tokens_whatever_the_worker_says(desk: Any) -> None:
    (group,) = desk.lease()
    put = m.Put(group=group.group, lease=group.lease, lineage="L")
    assert desk.ask("w", put, bulk=frames(made((m.NO_VERSION, 2), (0, 2), mask=[0, 0, 1, 1]))).result == "accepted"
    assert desk.state.groups.by_id["0/0"].oldest_version == 0


LONG = "\U0001f600" * 128


@pytest.mark.parametrize(
    "ask",
    [
        lambda desk: desk.ask(LONG, m.Hello(role="rollout", instance="1"), epoch=0),
        lambda desk: desk.ask("c", m.Hello(role="client", instance=LONG), epoch=0),
        lambda desk: desk.ask("me", m.Evaluate(key=LONG), run=""),
        lambda desk: desk.ask("me", m.Set(key=LONG), run=""),
        lambda desk: desk.ask("c", m.Push(key=LONG), bulk=[b"\x81\xa6prompt\xa1p"]),
        lambda desk: desk.ask("me", m.Import(group=f"import/{LONG}"), bulk=[b"\x81\xa6prompt\xa1p"], run=""),
    ],
)
def test_a_name_or_key_of_128_four_byte_characters_is_refused_before_anything_changes(desk: Any, ask: Any) -> None:
    desk.join("c", "client")
    before = list(desk.store.scan("meta"))
    assert ask(desk).code == "protocol"
    assert list(desk.store.scan("meta")) == before


def test_no_key_of_the_store_is_longer_than_lmdb_takes(desk: Any) -> None:
    longest = "import/" + "x" * (m.MAX_GROUP_BYTES - 7)
    assert desk.ask("me", m.Import(group=longest), bulk=[b"\x81\xa6prompt\xa1p"], run="").done
    assert len(field_key(longest, "f" * 64).encode()) <= 511


def test_a_lease_is_left_while_a_heartbeat_sent_before_its_deadline_may_be_unread(desk: Any) -> None:
    desk.lease()
    desk.now += 11.0
    desk.perform(desk.machine.tick(desk.now, heard_until=desk.now - 2.0))
    assert desk.status["groups"]["leased"] == 1
    desk.perform(desk.machine.tick(desk.now, heard_until=desk.now))
    assert desk.status["groups"]["leased"] == 0

"""Consumers: cursors of their own, fields put late, groups that are held until their fields are there."""

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
from made_samples import frames, made

from broker.state import consumers
from broker.state.effects import Reply, StoredPayload
from slimebus.bus import messages as m


@pytest.fixture
def critic(desk: Any) -> Any:
    desk.join("critic", "consumer")
    return desk


def read(desk: Any, after: int = 0, name: str = "critic", **how: Any) -> m.ReadReply:
    reply = desk.ask(name, m.Read(count=how.pop("count", 8), wait_s=0.0, after=after, **how))
    assert isinstance(reply, m.ReadReply), reply
    return reply


def names(reply: m.ReadReply) -> list[str]:
    return [g.group for g in reply.groups]


def encoded(fields: list[m.Field]) -> bytes:
    return msgspec.msgpack.encode(fields)


def values(lengths: list[int], value: float = 0.5, name: str = "values") -> tuple[m.Field, bytes]:
    field = m.Field(name=name, dtype="float32", shapes=[[n] for n in lengths])
    return field, b"".join(struct.pack(f"<{n}f", *[value] * n) for n in lengths)


def put_values(desk: Any, group: Any, who: str = "critic", lease: int | None = None, **how: Any) -> Any:
    field, frame = values([4], **how)
    return desk.ask(who, m.PutFields(group=group.group, lease=lease or group.lease), bulk=[encoded([field]), frame])


# --- reading ---


def test_a_consumer_reads_every_group_once_it_is_acknowledged_and_takes_none_from_the_trainer(critic: Any) -> None:
    made = critic.fill(4)
    first = read(critic, count=3)
    assert names(first) == made[:3]
    assert names(read(critic, count=3)) == made[:3], "the same until they are acknowledged"
    second = read(critic, after=first.groups[-1].position)
    assert names(second) == made[3:]
    assert not read(critic, after=second.groups[-1].position).groups
    assert critic.batch(0) == made[:2]


def test_a_read_looks_at_no_more_groups_than_it_is_answered_with(critic: Any) -> None:
    made = critic.fill(4)
    seen: list[str] = []
    rest = critic.state.groups.readable_after

    def readable_after(position: int) -> Iterator[Any]:
        return (seen.append(group.id) or group for group in rest(position))  # type: ignore[func-returns-value]

    critic.state.groups.readable_after = readable_after
    assert names(read(critic, count=1)) == made[:1] == seen
    assert isinstance(rest(0), Iterator), "nothing makes a list of what lies behind"
    assert critic.status["consumers"][0]["behind"] == 4


def test_consumers_have_cursors_of_their_own(critic: Any) -> None:
    made = critic.fill(2)
    critic.join("teacher", "consumer")
    read(critic, after=read(critic).groups[-1].position)
    assert names(read(critic, name="teacher")) == made


def test_a_read_waits_for_the_next_put(critic: Any) -> None:
    number = critic.send("critic", m.Read(count=8, wait_s=30.0))
    assert number not in critic.answers
    (made,) = critic.fill(1)
    assert names(critic.answers[number]) == [made]


def test_a_read_whose_wait_ran_out_says_what_it_waits_for(critic: Any) -> None:
    critic.fill(1)
    number = critic.send("critic", m.Read(count=8, wait_s=5.0, needs=["teacher_logprobs"]))
    critic.pass_time(6)
    assert "lacks field 'teacher_logprobs'" in critic.answers[number].reason


def test_a_newer_read_takes_the_place_of_an_older_one(critic: Any) -> None:
    older = critic.send("critic", m.Read(count=8, wait_s=30.0))
    newer = critic.send("critic", m.Read(count=8, wait_s=30.0))
    assert critic.answers[older].groups == []
    critic.fill(1)
    assert critic.answers[newer].groups


def test_groups_are_read_while_assigned_and_trained_until_they_are_freed(critic: Any) -> None:
    made = critic.fill(4)
    critic.train(0)
    assert names(read(critic)) == made
    critic.train(1, checkpoint=1)
    reply = read(critic)
    assert (names(reply), reply.num_skipped) == (made[2:], 2)


def test_what_is_requeued_is_skipped_and_comes_back_as_a_new_attempt(begun_desk: Any) -> None:
    desk = begun_desk(max_staleness=0)
    desk.join("critic", "consumer")
    groups = desk.lease(2)
    desk.put(groups[0])
    first = read(desk)
    position = first.groups[0].position
    desk.put(groups[1])
    assert read(desk, after=position).groups
    desk.join("t", "trainer", "2")
    assert desk.ask("t", m.Resume(step=0, version=5, lineage="M")) == m.Ok()
    desk.publish(5, "M")
    desk.ask("t", m.Batch(step=0, wait_s=0))  # sweeps: version 0 is too old for version 5
    assert not read(desk, after=position).groups
    again = desk.lease(1, 5, lineage="M")[0]
    assert again.lease > groups[1].lease
    desk.put(again, 5, lineage="M")
    reply = read(desk, after=position)
    assert [(g.group, g.lease) for g in reply.groups] == [(again.group, again.lease)]
    assert reply.num_skipped == 1


def test_a_cursor_survives_the_broker_and_the_consumer(critic: Any) -> None:
    made = critic.fill(4)
    first = read(critic, count=2)
    read(critic, after=first.groups[-1].position, count=1)
    critic.restart()
    critic.join("critic", "consumer", "2")
    assert names(read(critic)) == made[2:]


def test_an_older_consumer_of_the_name_is_fenced(critic: Any) -> None:
    old = critic.epochs["critic"]
    critic.join("critic", "consumer", "2")
    refused = critic.ask("critic", m.Read(count=1, wait_s=0.0), epoch=old)
    assert refused.code == "fenced"


def test_a_consumer_goes_back_to_a_checkpoint_of_its_own_and_skips_what_is_gone(critic: Any) -> None:
    made = critic.fill(4)
    positions = [group.position for group in read(critic).groups]
    assert not read(critic, after=positions[3]).groups
    assert not read(critic, after=positions[0]).groups, "an older position alone is no way back"
    again = read(critic, after=positions[0], back=True)
    assert (names(again), again.position) == (made[1:], positions[0])
    critic.restart()
    critic.join("critic", "consumer")
    assert names(read(critic)) == made[1:], "it survives the broker"
    assert names(read(critic, after=positions[1], back=True)) == made[2:], "forward it is an acknowledgement"
    assert critic.batch(0) == made[:2]
    critic.ask("t", m.Commit(step=0, checkpoint=1))
    again = read(critic, after=0, back=True)
    assert (names(again), again.num_skipped) == (made[2:], 2)


def test_a_consumer_that_comes_late_begins_at_the_oldest_group_kept(desk: Any) -> None:
    made = desk.fill(4)
    desk.train(0, checkpoint=1)
    desk.join("late", "consumer")
    reply = read(desk, name="late")
    assert (names(reply), reply.num_skipped) == (made[2:], 0)


def test_shards_share_the_groups(critic: Any) -> None:
    made = critic.fill(4)
    critic.join("other", "consumer")
    one, two = read(critic, shard=0, shards=2), read(critic, name="other", shard=1, shards=2)
    assert sorted(names(one) + names(two)) == sorted(made)
    assert len(names(one)) == 2
    assert (one.num_skipped, two.num_skipped) == (0, 0)


def test_only_consumers_read_and_put_fields(critic: Any) -> None:
    critic.fill(1)
    assert critic.ask("w", m.Read(count=1, wait_s=0.0)).code == "role"
    assert critic.ask("t", m.PutFields(group="0/0", lease=1)).code == "role"
    assert critic.ask("critic", m.Batch(step=0, wait_s=0.0)).code == "role"


@pytest.mark.parametrize(
    "ask", [m.Read(count=0, wait_s=0), m.Read(count=1, wait_s=0, shard=2, shards=2), m.Read(count=1, wait_s=0, shards=0)]
)
def test_impossible_reads_are_refused(critic: Any, ask: m.Read) -> None:
    assert critic.ask("critic", ask).code == "protocol"


def test_acknowledging_what_was_never_given_is_refused(critic: Any) -> None:
    critic.fill(1)
    assert critic.ask("critic", m.Read(count=1, wait_s=0, after=2)).code == "position"


def test_cursors_are_bounded_and_the_one_furthest_behind_goes_first(desk: Any) -> None:
    desk.fill(4)
    for i in range(consumers.MAX_CONSUMERS):
        desk.join(f"c{i}", "consumer")
        read(desk, name=f"c{i}", after=0 if i == 7 else 2)
        desk.ask(f"c{i}", m.Goodbye())
    desk.join("one more", "consumer")
    read(desk, name="one more")
    assert len(desk.state.consumers) == consumers.MAX_CONSUMERS
    assert "c7" not in desk.state.consumers


def test_a_consumer_that_fell_silent_in_a_read_is_forgotten_with_its_read(critic: Any) -> None:
    number = critic.send("critic", m.Read(count=1, wait_s=600.0))
    critic.pass_time(critic.rules.client_timeout_s + 1)
    for i in range(consumers.MAX_CONSUMERS):
        critic.join(f"c{i}", "consumer")
        read(critic, name=f"c{i}")
    assert "critic" not in critic.state.consumers
    assert critic.status["parked"] == []
    critic.join("w", "rollout", instance="2")
    critic.fill(1)
    assert number not in critic.answers


def test_consumers_stand_in_the_status(critic: Any) -> None:
    critic.fill(4)
    first = read(critic, count=3)
    put_values(critic, first.groups[0])
    read(critic, after=first.groups[-1].position)
    (row,) = critic.status["consumers"]
    assert (row["name"], row["position"], row["behind"], row["read"], row["fields"]) == ("critic", 3, 1, 3, {"values": 1})


def test_a_consumer_keeps_no_finished_run_alive(critic: Any) -> None:
    number = critic.send("critic", m.Read(count=8, wait_s=600.0))
    critic.ask("t", m.Finish())
    assert critic.answers[number].finished
    for name in ("t", "w", "critic"):
        critic.ask(name, m.Goodbye())
    assert critic.machine.is_over


@pytest.mark.parametrize("asks", [True, False])
def test_a_consumer_in_the_middle_of_its_work_is_told_of_the_end_before_the_broker_leaves(critic: Any, asks: bool) -> None:
    critic.fill(1)
    read(critic)
    critic.ask("t", m.Finish())
    for name in ("t", "w"):
        critic.ask(name, m.Goodbye())
    assert not critic.machine.is_over
    if asks:
        number = critic.send("critic", m.Heartbeat())
        assert critic.answers[number].finished
        assert not critic.machine.is_over, "the answer may have been lost"
        critic.send("critic", m.Heartbeat(), request=number)
        assert not critic.machine.is_over, "it was: the request came again"
        assert critic.ask("critic", m.Heartbeat()).finished
    else:
        critic.pass_time(60.0)  # it was killed
    assert critic.machine.is_over


def test_a_consumer_that_knew_of_an_end_is_told_of_the_next_one_when_the_run_was_extended(critic: Any) -> None:
    critic.ask("t", m.Finish())
    critic.ask("critic", m.Heartbeat())
    critic.ask("critic", m.Heartbeat())
    assert critic.state.clients["critic"].knows_end
    assert critic.ask("t", m.Resume(step=0, version=0, lineage="M")) == m.Ok()
    assert not critic.ask("critic", m.Heartbeat()).finished
    critic.ask("t", m.Finish())
    critic.ask("critic", m.Heartbeat())
    assert not critic.state.clients["critic"].knows_end


# --- late fields ---


def test_a_late_field_is_read_and_fetched_beside_the_others(critic: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Reply] = []
    perform = critic.perform
    monkeypatch.setattr(critic, "perform", lambda effects: (seen.extend(e for e in effects if isinstance(e, Reply)), perform(effects)))
    critic.fill(2)
    for group in read(critic).groups:
        assert put_values(critic, group) == m.PutFieldsReply(result="accepted")
    assert [g.num_frames for g in read(critic).groups] == [5, 5]
    reply = critic.ask("t", m.Fetch(groups=critic.batch(0)))
    assert reply.num_frames == [5, 5]
    payload = seen[-1].bulk[0]
    assert isinstance(payload, StoredPayload)
    assert [f.name for f in payload.late] == ["values"]
    assert critic.store.get("fields", "0/0\nvalues") is not None


def test_needs_hold_a_reader_until_another_consumer_has_put_the_field(critic: Any) -> None:
    critic.join("teacher", "consumer")
    critic.fill(2)
    number = critic.send("critic", m.Read(count=8, wait_s=30.0, needs=["teacher_logprobs"]))
    assert number not in critic.answers
    group = read(critic, name="teacher").groups[0]
    put_values(critic, group, who="teacher", name="teacher_logprobs")
    assert names(critic.answers[number]) == [group.group], "and no further than the first that lacks it"


def test_a_reader_that_waits_for_a_field_goes_on_when_its_group_is_freed(critic: Any) -> None:
    critic.fill(4)
    put_values(critic, read(critic).groups[2])
    number = critic.send("critic", m.Read(count=8, wait_s=30.0, needs=["values"]))
    assert number not in critic.answers
    critic.train(0, checkpoint=1)
    assert names(critic.answers[number]) == ["0/2"]
    assert critic.answers[number].num_skipped == 2


def test_a_repeat_is_acknowledged_and_nothing_is_replaced(critic: Any) -> None:
    critic.join("other", "consumer")
    critic.fill(1)
    (group,) = read(critic).groups
    assert put_values(critic, group).result == "accepted"
    assert put_values(critic, group).result == "duplicate"
    assert put_values(critic, group, value=0.7).result == "duplicate", "a restarted producer; its first value stays"
    assert put_values(critic, group, who="other").result == "duplicate", "the same bytes"
    refused = put_values(critic, group, who="other", value=0.7)
    assert (refused.code, "consumer critic" in refused.text) == ("field_exists", True)
    critic.restart()
    assert put_values(critic, group).result == "duplicate"


def test_a_field_of_the_worker_is_not_replaced(critic: Any) -> None:
    critic.fill(1)
    (group,) = read(critic).groups
    assert put_values(critic, group, name="tokens").code == "field_exists"


def test_fields_for_samples_that_are_gone_are_refused_with_the_reason(critic: Any) -> None:
    critic.fill(2)
    group = read(critic).groups[0]
    assert "lease 7" in put_values(critic, group, lease=7).reason
    critic.train(0)
    trained = put_values(critic, group)
    assert (trained.result, trained.reason) == ("gone", "group 0/0 is trained already")
    critic.ask("t", m.Commit(step=0, checkpoint=1))
    assert put_values(critic, group).result == "gone"
    assert critic.status["counted"]["late fields discarded"] == 3


def test_a_field_that_comes_after_the_fetch_says_so(critic: Any) -> None:
    critic.fill(2)
    group = read(critic).groups[0]
    critic.ask("t", m.Fetch(groups=critic.batch(0)))
    assert put_values(critic, group) == m.PutFieldsReply(result="accepted", reason="the trainer has fetched step 0 already")


@pytest.mark.parametrize(
    ("field", "frame", "says"),
    [
        (m.Field(name="v", dtype="float32", shapes=[[3]]), bytes(12), r"shape \[3\]; expected \[4, ...\]"),
        (m.Field(name="v", dtype="float32", shapes=[[4], [4]]), bytes(32), "2 shapes for 1 samples"),
        (m.Field(name="v", dtype="float32", shapes=[[4]]), bytes(15), "a frame of 15 bytes; its dtype and shapes make 16"),
        (m.Field(name="v", dtype="object", shapes=[[4]]), bytes(16), "dtype 'object'; expected one of"),
        (m.Field(name="v", dtype="uint8", shapes=[[4, -1]]), b"", "expected at most 8 dimensions"),
        (m.Field(name="v", dtype="uint8", shapes=[[4, 1 << 40]]), b"", "expected at most 8 dimensions"),
        (m.Field(name="", dtype="uint8", shapes=[[4]]), bytes(4), "field '': its name"),
        (m.Field(name="a\nb", dtype="uint8", shapes=[[4]]), bytes(4), "ASCII"),
        (m.Field(name="x" * 65, dtype="uint8", shapes=[[4]]), bytes(4), "1 to 64"),
    ],
)
def test_fields_that_do_not_fit_the_samples_are_refused(critic: Any, field: m.Field, frame: bytes, says: str) -> None:
    critic.fill(1)
    refused = critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([field]), frame])
    assert refused.code == "protocol"
    assert __import__("re").search(says, refused.text), refused.text
    assert not critic.state.groups.by_id["0/0"].late


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("bfloat16", [4, 2, 3], 48), ("float64", [], 8), ("int8", [1, 5], 5), ("uint8", [4, 0], 0)]
)
def test_fields_have_an_entry_a_token_or_one_a_sample(critic: Any, dtype: str, shape: list[int], size: int) -> None:
    critic.fill(1)
    field = m.Field(name="v", dtype=dtype, shapes=[shape])
    assert critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([field]), bytes(size)]).result == "accepted"


def test_failed_samples_count_among_the_shapes(critic: Any) -> None:
    (group,) = critic.lease(1)
    critic.put(group, rewards=(1.0, None))
    field, frame = values([4, 4])
    assert critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([field]), frame]).result == "accepted"


def test_several_fields_are_taken_all_or_none(critic: Any) -> None:
    critic.fill(1)
    good, frame = values([4])
    bad = m.Field(name="bad", dtype="float32", shapes=[[3]])
    assert critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([good, bad]), frame, bytes(12)]).code == "protocol"
    assert not critic.state.groups.by_id["0/0"].late
    assert critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([good, good]), frame, frame]).code == "protocol"


def test_a_group_never_outgrows_what_can_be_fetched(critic: Any) -> None:
    critic.fill(1)
    field = m.Field(name="v", dtype="uint8", shapes=[[4, 2500]])
    assert critic.ask("critic", m.PutFields(group="0/0", lease=1), bulk=[encoded([field]), bytes(10_000)]).code == "too_large"


def test_fields_go_with_their_samples(critic: Any) -> None:
    critic.fill(2)
    for group in read(critic).groups:
        put_values(critic, group)
    critic.train(0, checkpoint=1)
    assert list(critic.store.scan("fields")) == []


# --- required fields ---


@pytest.fixture
def strict(begun_desk: Any) -> Any:
    """Two groups a step, none without `values`."""
    desk = begun_desk(required_fields=["values"], stall_min_s=4.0, lease_s=15.0, client_timeout_s=1000.0)
    desk.join("critic", "consumer")
    return desk


def test_a_group_is_in_no_batch_before_its_required_fields_are_there(strict: Any) -> None:
    made = strict.fill(3)
    number = strict.send("t", m.Batch(step=0, wait_s=30.0))
    groups = read(strict).groups
    put_values(strict, groups[2])
    assert number not in strict.answers
    put_values(strict, groups[0])
    assert [g.group for g in strict.answers[number].groups] == [made[0], made[2]]


def test_a_field_that_the_worker_put_counts(strict: Any) -> None:
    for group in strict.lease(2):
        put = m.Put(group=group.group, lease=group.lease, lineage="L")
        bulk = frames(made((0, 4), extras={"values": np.zeros(4, np.float32)}))
        assert strict.ask("w", put, bulk=bulk).result == "accepted"
    assert len(strict.batch(0)) == 2


def test_held_groups_count_for_admission_and_survive_a_restart(strict: Any) -> None:
    strict.fill(4)
    assert strict.lease(1) == []
    strict.restart()
    assert strict.status["groups"]["held"] == 4
    assert strict.batch(0) == []
    for group in read(strict).groups:
        put_values(strict, group)
    assert len(strict.batch(0)) == 2


def test_a_held_group_that_grew_too_old_is_not_handed_out_when_its_field_comes(strict: Any) -> None:
    strict.fill(4)
    groups = read(strict).groups
    for step in range(2):
        for group in strict.lease(2, step):
            strict.put(group, step)
        fresh = [g for g in read(strict, after=4 if step else 0).groups if g.position > 4][-2:]
        fresh = fresh or groups[2:]
        for group in fresh:
            put_values(strict, group)
        assert strict.train(step)
    strict.ask("t", m.Batch(step=2, wait_s=0.0))
    assert put_values(strict, groups[0]).result == "gone"
    assert "ready>queued stale" in strict.status["moves"]


def test_the_watchdog_says_which_field_is_missing_and_who_used_to_put_it(strict: Any) -> None:
    strict.fill(2)
    strict.ask("t", m.Batch(step=0, wait_s=600.0))
    strict.pass_time(50)
    found = strict.status["stalled"]
    assert found["role"] == "trainer", "its own silence comes first"
    strict.ask("t", m.Heartbeat())
    found = strict.status["stalled"]
    assert (found["role"], found["who"]) == ("consumer", [])
    assert found["reason"].endswith("2 wait for field 'values', which no consumer has put so far")
    put_values(strict, read(strict).groups[0])
    strict.pass_time(94)
    strict.ask("t", m.Heartbeat())
    found = strict.status["stalled"]
    assert (found["role"], found["who"]) == ("consumer", ["critic"])
    assert found["reason"].endswith("1 of 2 groups ready; 1 wait for field 'values', put by critic (silent for 94 s)")


def test_a_rewind_keeps_fields_of_samples_that_stay(strict: Any) -> None:
    made = strict.fill(2)
    for group in read(strict).groups:
        put_values(strict, group)
    assert strict.batch(0) == made
    strict.join("t", "trainer", "2")
    strict.ask("t", m.Resume(step=0, version=0, lineage="M"))
    strict.publish(0, "M")
    assert strict.batch(0) == made

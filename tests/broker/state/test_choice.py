"""Which groups a batch gets: by tokens, with a surplus, by a plug-in, filtered; and that none of it wedges a run."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from made_samples import frames, made

from broker.buffer_filter import ReadyGroup, buffer_filter
from broker.state.groups import mean_and_deviation
from broker.state.records import BatchWanted
from slimebus.bus import messages as m
from slimebus.bus.errors import HookError


def put_sized(desk: Any, group: m.LeasedGroup, num_tokens: int, version: int = 0) -> m.PutReply:
    put = m.Put(group=group.group, lease=group.lease, lineage="L")
    reply: m.PutReply = desk.ask("w", put, bulk=frames(made((version, num_tokens))))
    return reply


# --- held until full ---


def test_the_first_batch_waits_for_all_groups_that_the_bound_allows_and_no_later_one_does(begun_desk: Any) -> None:
    desk = begun_desk(fill_first=True, batch_size=2, max_staleness=2)
    groups = desk.lease(99)
    assert len(groups) == 6
    for group in groups[:-1]:
        put_sized(desk, group, 10)
    assert desk.batch(0) == []
    put_sized(desk, groups[-1], 10)
    assert [desk.batch(step) for step in range(3)] == [["0/0", "0/1"], ["0/2", "0/3"], ["0/4", "0/5"]]


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_first_batch_within_an_interval_of_versions_waits_for_no_more_than_workers_may_start(new_desk: Any, first: int) -> None:
    desk = new_desk(fill_first=True, batch_size=2, max_staleness=1, publish_interval=3)
    desk.begin(step=first, version=first // 3)
    groups = desk.lease(99, serving=first // 3)
    for group in groups:
        assert desk.batch(first) == []
        put_sized(desk, group, 10, first // 3)
    assert len(groups) == 2 * (6 - first % 3)
    assert len(desk.batch(first)) == 2


def test_a_first_batch_waits_for_no_more_than_the_run_and_the_buffer_have_room_for(begun_desk: Any) -> None:
    for limit in ({"num_steps": 2}, {"buffer_capacity": 4}):
        desk = begun_desk(fill_first=True, batch_size=2, max_staleness=8, **limit)
        groups = desk.lease(99)
        assert len(groups) == 4
        for group in groups:
            assert desk.batch(0) == []
            put_sized(desk, group, 10)
        assert desk.batch(0) == ["0/0", "0/1"]


# --- by tokens ---


def test_a_batch_of_tokens_is_the_first_groups_that_fit(begun_desk: Any) -> None:
    desk = begun_desk(batch_tokens=100, batch_size=4, max_staleness=3)
    for group, size in zip(desk.lease(5), (40, 40, 30, 10, 60), strict=True):
        put_sized(desk, group, size)
    assert desk.batch(0) == ["0/0", "0/1"], "0/2 does not fit, and none is put before it"
    assert desk.batch(1) == ["0/2", "0/3", "0/4"]


def test_a_group_larger_than_a_batch_is_one(begun_desk: Any) -> None:
    desk = begun_desk(batch_tokens=100, batch_size=4)
    put_sized(desk, desk.lease(1)[0], 500)
    assert desk.batch(0) == ["0/0"]


def test_admission_counts_in_tokens_of_the_last_groups(begun_desk: Any) -> None:
    desk = begun_desk(batch_tokens=100, batch_size=4, max_staleness=0)
    first = desk.lease(99)
    assert len(first) == 4, "before anything is known, four groups are taken to fill a batch"
    for group in first:
        put_sized(desk, group, 10)
    assert len(desk.lease(99)) == 6, "40 of 100 tokens are ready, and 10 a group is what is known now"


def test_small_groups_fill_the_buffer_and_go_rather_than_wait_for_ever(begun_desk: Any) -> None:
    desk = begun_desk(batch_tokens=1000, batch_size=2, buffer_capacity=3, max_staleness=0)
    for group in desk.lease(99) + desk.lease(99):
        put_sized(desk, group, 10)
    for group in desk.lease(99):
        put_sized(desk, group, 10)
    assert desk.status["groups"]["ready"] == 3
    assert len(desk.batch(0)) == 3, "there is no room for more"


def test_the_wait_for_a_batch_of_tokens_says_how_many_there_are(begun_desk: Any) -> None:
    desk = begun_desk(batch_tokens=100, batch_size=4)
    put_sized(desk, desk.lease(1)[0], 30)
    assert "1 groups of 30 of 100 tokens ready" in desk.ask("t", m.Batch(step=0, wait_s=0.0)).reason


# --- over-sampling ---


def test_over_sampling_trains_the_first_that_are_done_and_keeps_the_surplus_while_it_is_fresh(begun_desk: Any) -> None:
    desk = begun_desk(over_sampling=3, max_staleness=1)
    groups = desk.lease(99)
    assert len(groups) == 6
    for group in groups[1:4]:
        desk.put(group)
    assert desk.train(0) == ["0/1", "0/2"]
    assert desk.status["groups"]["ready"] == 1
    desk.put(groups[4])
    assert desk.batch(1) == ["0/3", "0/4"]


def test_on_policy_over_sampling_cuts_off_the_slowest_and_their_prompts_come_back(begun_desk: Any) -> None:
    desk = begun_desk(over_sampling=4, max_staleness=0)
    groups = desk.lease(99)
    assert len(groups) == 4
    for group in groups[1:4]:
        desk.put(group)
    desk.train(0)
    assert desk.status["groups"]["leased"] == 0, "what was begun with version 0 can be in no step any more"
    assert desk.status["moves"]["leased>queued surplus"] == 1
    assert desk.ask("w", m.Heartbeat(lineage="L", serving=1, leases=[groups[0].lease])).surplus == [groups[0].lease]
    assert desk.batch(1) == []
    assert desk.status["waste"]["stale"] == {"groups": 1, "tokens": 4}, "the one that was ready and not chosen"
    assert [g.group for g in desk.lease(99, serving=1)] == ["0/0", "0/3", "0/4", "0/5"]


def test_a_batch_is_chosen_before_new_groups_are_leased_for_the_room_it_leaves(begun_desk: Any) -> None:
    desk = begun_desk(batch_size=1, over_sampling=2, max_staleness=0)
    failed, good = desk.lease(2)
    desk.join("other", "rollout")
    batch, lease = desk.send("t", m.Batch(step=0, wait_s=60.0)), desk.send("other", m.Lease(want=1, wait_s=60.0, lineage="L", serving=0))
    back = m.GiveBack(group=failed.group, lease=failed.lease, outcome="drop", reason="too easy")
    put = m.Put(group=good.group, lease=good.lease, lineage="L")
    with desk.burst():
        desk.send("w", back)
        desk.send("w", put, bulk=frames(made((0, 4), reward=1.0)))
    assert [group.group for group in desk.answers[batch].groups] == [good.group]
    assert lease not in desk.answers, "a group of version 0 would be trained in step 1, and the bound is 0"


# --- the dynamic filter ---


def test_a_group_without_spread_is_dropped_counted_and_replaced(begun_desk: Any) -> None:
    desk = begun_desk(needs_spread=True, samples_per_prompt=2, max_staleness=0)
    flat, mixed = desk.lease(99)
    assert desk.put(flat, rewards=(1.0, 1.0)).reason == "filtered: no reward spread"
    assert desk.put(mixed, rewards=(0.0, 1.0)) == m.PutReply(result="accepted")
    status = desk.status
    assert (status["groups"]["dropped"], status["groups"]["ready"]) == (1, 1)
    assert status["waste"]["filtered: no reward spread"] == {"groups": 1, "tokens": 8}
    assert status["filter"] == {"groups": 1, "in_a_row": 0, "limit": 1024}
    assert [g.group for g in desk.lease(99)] == ["0/2"], "another prompt takes its place"
    assert desk.store.get("payloads", flat.group) is None


def test_what_a_worker_filtered_out_counts_as_waste_too(desk: Any) -> None:
    group = desk.lease(1)[0]
    desk.ask("w", m.GiveBack(group=group.group, lease=group.lease, outcome="drop", reason="filtered", num_tokens=64))
    assert desk.status["waste"]["returned: filtered"] == {"groups": 1, "tokens": 64}
    assert desk.status["filter"]["in_a_row"] == 1


def test_when_everything_is_filtered_the_trainer_is_told_and_no_worker_goes_on(begun_desk: Any) -> None:
    desk = begun_desk(prompts=10**9, needs_spread=True, samples_per_prompt=2, max_filtered=5)
    waiting = desk.send("t", m.Batch(step=0, wait_s=60.0))
    while groups := desk.lease(1):
        desk.put(groups[0], rewards=(0.0, 0.0))
    assert desk.status["filter"]["groups"] == 5
    assert desk.answers[waiting].code == "all_filtered"
    assert "every prompt is too easy or too hard" in desk.answers[waiting].text
    assert desk.ask("t", m.Batch(step=0, wait_s=0.0)).code == "all_filtered"
    assert "dropped by the dynamic sampling filter" in desk.ask("w", m.Lease(want=1, wait_s=0.0, lineage="L", serving=0)).reason
    desk.restart()
    assert desk.lease(1) == [], "nor after a restart of the broker"
    desk.begin(lineage="M")
    assert len(desk.lease(1, lineage="M")) == 1, "a trainer that is restarted tries again"


def test_a_finite_source_that_is_filtered_away_says_so(begun_desk: Any) -> None:
    desk = begun_desk(prompts=3, needs_spread=True, samples_per_prompt=2)
    while groups := desk.lease(1):
        desk.put(groups[0], rewards=(1.0, 1.0))
    refused = desk.ask("t", m.Batch(step=0, wait_s=0.0))
    assert refused.code == "source_ended"
    assert "3 groups were dropped by the dynamic sampling filter" in refused.text


def test_spread_is_mean_and_population_deviation() -> None:
    assert mean_and_deviation([1.0, 0.0, 1.0, 0.0]) == (0.5, 0.5)
    assert mean_and_deviation([]) == (0.0, 0.0)
    assert all(mean_and_deviation([0.1 * k] * n)[1] == 0.0 for k in range(20) for n in range(1, 20)), "whatever rounding makes of the mean"


# --- a plug-in ---


class Unreadable(list[str]):
    """A list that fails when it is read."""

    def __iter__(self) -> Any:
        raise RuntimeError("not now")


def desk_with(new_desk: Any, choose: Callable[[Sequence[ReadyGroup], BatchWanted], Any], **rules: Any) -> Any:
    desk = new_desk(**({"max_staleness": 2} | rules))
    desk.buffer_filter = buffer_filter(choose)
    desk.restart()
    desk.begin()
    return desk


def test_a_buffer_filter_chooses_and_its_choice_is_kept(new_desk: Any) -> None:
    seen: list[tuple[Sequence[ReadyGroup], BatchWanted]] = []

    def newest(groups: Sequence[ReadyGroup], batch: BatchWanted) -> list[str]:
        seen.append((groups, batch))
        return [g.id for g in reversed(groups)][: batch.num_groups]

    desk = desk_with(new_desk, newest)
    for group, rewards in zip(desk.lease(3), [(1.0, 0.0), (1.0,), (0.5, 0.5)], strict=True):
        desk.put(group, rewards=rewards)
    assert desk.batch(0) == ["0/2", "0/1"]
    desk.restart()
    assert desk.batch(0) == ["0/2", "0/1"]
    assert len(seen) == 1
    groups, wanted = seen[0]
    assert wanted == BatchWanted(step=0, version=0, num_groups=2, num_tokens=0)
    assert groups[0] == ReadyGroup(
        id="0/0", admitted=1, attempt=1, num_samples=2, num_tokens=8, oldest_version=0, staleness=0, reward_mean=0.5, reward_std=0.5
    )


def test_a_buffer_filter_is_offered_only_what_is_fresh_enough(new_desk: Any) -> None:
    offered: list[list[int]] = []

    def first(groups: Sequence[ReadyGroup], batch: BatchWanted) -> list[str]:
        offered.append([g.staleness for g in groups])
        return [g.id for g in groups][-batch.num_groups :]

    desk = desk_with(new_desk, first, max_staleness=1)
    desk.fill(4)
    for step in range(3):
        desk.train(step)
        desk.fill(2, version=step + 1)
    assert offered == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0]], "in step 2 the two of version 0 are gone"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (["0/0"], "1 groups for a batch of 2"),
        (["0/0", "0/1", "0/2"], "3 groups for a batch of 2"),
        (["0/0", "0/0"], "named twice"),
        (["0/0", "9/9"], "'9/9' is not one of the 3 groups offered"),
        ([], "0 groups for a batch of 2"),
        (None, "gave NoneType; expected a list of group ids"),
        ("0/0", "gave str; expected a list"),
        ([0, 1], "expected a list of group ids"),
        (HookError("buffer filter f.py:f: KeyError: 'x'"), "KeyError"),
        (Unreadable(["0/0", "0/1"]), "RuntimeError: not now"),
        (SystemExit("enough"), "SystemExit: enough"),
    ],
)
def test_a_bad_answer_of_a_buffer_filter_is_refused_counted_and_the_run_goes_on(new_desk: Any, answer: Any, text: str) -> None:
    def bad(groups: Sequence[ReadyGroup], batch: BatchWanted) -> Any:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    desk = desk_with(new_desk, bad)
    desk.fill(3)
    assert desk.batch(0) == ["0/0", "0/1"]
    assert desk.status["counted"]["buffer filter answers refused"] == 1
    assert any(text in note for note in desk.notes), desk.notes


def test_a_buffer_filter_for_batches_of_tokens_may_not_overfill_them(new_desk: Any) -> None:
    desk = desk_with(new_desk, lambda groups, batch: [g.id for g in groups], batch_tokens=10, batch_size=2)
    for group in desk.lease(3):
        put_sized(desk, group, 5)
    assert desk.batch(0) == ["0/0", "0/1"]
    assert any("3 groups of 15 tokens; at most 10 fit a batch" in note for note in desk.notes)


@pytest.mark.parametrize("on_stale", ["requeue", "drop"])
@pytest.mark.parametrize("interval", [1, 2, 3])
def test_on_policy_with_a_slow_pace_of_versions_trains_only_the_current_one(begun_desk: Any, on_stale: str, interval: int) -> None:
    desk = begun_desk(max_staleness=0, publish_interval=interval, on_stale=on_stale, prompts=1000)
    for step in range(9):
        serving = desk.state.meta.version
        while groups := desk.lease(1, serving=serving):
            desk.put(groups[0], version=serving)
        reply = desk.ask("t", m.Batch(step=step, wait_s=0.0))
        assert [g.oldest_version for g in reply.groups] == [reply.version] * 2
        desk.publish(desk.state.version_of(step + 1))
        assert desk.ask("t", m.Commit(step=step, checkpoint=step)) == m.Ok()
    assert desk.status["lag"]["max"] == 0

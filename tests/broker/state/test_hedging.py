"""A second lease for slow groups: the first put wins, one of two may end, the group stays one group."""

import random
from typing import Any

import pytest

from slimebus import messages as m

USUAL_S = 10.0


class Hedged:
    """Eight groups took 10 s each; w1 has held one for 31 s when w2, which serves version 1, waits for anything to do."""

    def __init__(self, new_desk: Any, start: float = 100.0, **rules: Any) -> None:
        settings = {"hedge_after": 3.0, "batch_size": 4, "max_staleness": 2, "num_steps": 3, "lease_s": 1000.0, "client_timeout_s": 1000.0}
        self.desk = desk = new_desk(**(settings | rules))
        desk.now = start
        desk.begin()
        for name in ("w1", "w2"):
            desk.join(name, "rollout")
        for _ in range(2):
            groups = desk.lease(4, 0)
            desk.pass_time(USUAL_S)
            for group in groups:
                desk.put(group, 0)
        desk.train(0)
        (self.slow,) = desk.lease(1, 1, name="w1")
        self.others = desk.lease(3, 1)
        for group in self.others:
            desk.put(group, 1)  # every group of the three steps is leased, ready or trained

    def wait(self, name: str = "w2", serving: int = 1, want: int = 2, request: int = 0) -> int:
        """A worker with room whose request waits."""
        return int(self.desk.send(name, m.Lease(want=want, wait_s=600.0, lineage="L", serving=serving), request=request))

    def hedge(self) -> m.LeasedGroup:
        number = self.wait()
        self.desk.pass_time(31.0)
        return self.desk.answers.pop(number).groups[0]

    @property
    def group(self) -> Any:
        return self.desk.state.groups.by_id[self.slow.group]

    @property
    def counted(self) -> dict[str, int]:
        return self.desk.status["counted"]

    def beat(self, name: str, *leases: int) -> list[int]:
        return self.desk.ask(name, m.Heartbeat(lineage="L", serving=1, leases=list(leases))).lost

    def check(self) -> None:
        """Leases, deadlines and times agree, and every lease is found from its worker."""
        state = self.desk.state
        held = {g.lease for g in state.groups.by_id.values() if g.phase == "leased"}
        held |= {g.second.lease for g in state.groups.by_id.values() if g.second is not None}
        assert held == set(state.groups.by_lease) == set(state.lease_deadlines) == set(state.lease_since)
        assert all(g.second is None for g in state.groups.by_id.values() if g.phase != "leased")
        assert sorted(lease for c in state.clients for lease in state.groups._by_worker.get(c, {})) == sorted(held)


@pytest.fixture
def hedged(new_desk: Any) -> Hedged:
    return Hedged(new_desk)


def test_a_slow_group_is_leased_again_to_a_worker_that_has_nothing_else_to_do(hedged: Hedged) -> None:
    number = hedged.wait()
    hedged.desk.pass_time(29.0)
    assert number not in hedged.desk.answers, "not before three times the usual"
    hedged.desk.pass_time(2.0)
    (again,) = hedged.desk.answers[number].groups
    assert (again.group, again.attempt) == (hedged.slow.group, 2)
    assert again.lease != hedged.slow.lease
    assert hedged.desk.status["groups"]["leased"] == 1, "admission counts it once"
    hedged.check()


def test_it_is_off_by_default(new_desk: Any) -> None:
    hedged = Hedged(new_desk, hedge_after=0.0)
    number = hedged.wait()
    hedged.desk.pass_time(500.0)
    assert number not in hedged.desk.answers


def test_the_machine_wakes_for_it(hedged: Hedged) -> None:
    hedged.wait()
    assert hedged.desk.machine.next_deadline() <= hedged.desk.now + 30.0


def test_the_wake_up_is_never_too_early_to_act(new_desk: Any) -> None:
    """Woken at the time it asked for, it acts: were it a rounding error too early, it would be woken again at once, for ever."""
    for seed in range(40):
        chance = random.Random(seed)
        start = 2.0 ** chance.randint(7, 12) - chance.uniform(21, 30)  # sums round differently on the two sides of a power of two
        hedged = Hedged(new_desk, start, hedge_after=chance.uniform(1, 4))
        number, desk = hedged.wait(), hedged.desk
        for _ in range(20):
            if number not in desk.answers:
                desk.now = max(desk.now, desk.machine.next_deadline())
                desk.pass_time(0.0)
        assert desk.answers[number].groups, seed


def test_the_worker_that_holds_it_does_not_get_it_again_and_nobody_a_third_time(hedged: Hedged) -> None:
    number = hedged.wait("w1")
    hedged.desk.pass_time(100.0)
    assert number not in hedged.desk.answers
    hedged.hedge()
    number = hedged.wait("w")
    hedged.desk.pass_time(500.0)
    assert number not in hedged.desk.answers


@pytest.mark.parametrize("first", ["w1", "w2"])
def test_the_first_put_wins_and_the_other_is_told_and_counted(hedged: Hedged, first: str) -> None:
    again = hedged.hedge()
    mine, other, late = (hedged.slow, again, "w2") if first == "w1" else (again, hedged.slow, "w1")
    assert hedged.desk.put(mine, 1, name=first).result == "accepted"
    hedged.check()
    assert hedged.beat(late, other.lease) == [other.lease]
    waste = hedged.desk.status["waste"]["hedged: another put came first"]
    assert waste == {"groups": 1, "tokens": 0}
    assert hedged.desk.put(other, 1, name=late).result == "discarded"
    assert hedged.desk.status["waste"] == {"hedged: another put came first": {"groups": 1, "tokens": 4}}
    assert hedged.desk.put(mine, 1, name=first).result == "duplicate"
    assert hedged.counted["hedges won" if first == "w2" else "hedges lost"] == 1
    assert (hedged.group.worker, hedged.group.put_attempt) == (first, mine.attempt)


def test_a_repeated_request_gets_the_same_second_lease(hedged: Hedged) -> None:
    number = hedged.wait(request=77)
    hedged.desk.pass_time(31.0)
    first = hedged.desk.answers.pop(number).groups
    assert hedged.wait(request=77) == number
    again = hedged.desk.answers.pop(number).groups
    assert [(g.lease, g.attempt) for g in again] == [(g.lease, g.attempt) for g in first]


@pytest.mark.parametrize("ends", ["first", "second"])
@pytest.mark.parametrize("how", ["expiry", "requeue", "fail", "partial", "goodbye", "restart", "failed samples"])
def test_one_of_two_may_end_and_the_other_finishes(hedged: Hedged, ends: str, how: str) -> None:
    desk, again = hedged.desk, hedged.hedge()
    gone, kept = (hedged.slow, again) if ends == "first" else (again, hedged.slow)
    who, stays = ("w1", "w2") if ends == "first" else ("w2", "w1")
    if how == "expiry":
        desk.pass_time(900.0)
        assert hedged.beat(stays, kept.lease) == []
        desk.pass_time(150.0)
    elif how in ("requeue", "fail", "partial"):
        desk.ask(who, m.GiveBack(group=gone.group, lease=gone.lease, outcome=how, reason="test"))
    elif how == "goodbye":
        desk.ask(who, m.Goodbye())
    elif how == "restart":
        desk.join(who, "rollout", "2")
    else:
        assert desk.put(gone, 1, name=who, rewards=(None,)).result == "accepted"
    hedged.check()
    assert (hedged.group.phase, hedged.group.failures) == ("leased", int(how in ("expiry", "fail", "failed samples")))
    assert hedged.group.second is None
    if how not in ("goodbye",):
        assert desk.put(gone, 1, name=who).result == ("duplicate" if how == "failed samples" else "discarded")
    assert desk.put(kept, 1, name=stays).result == "accepted"
    hedged.check()


def test_when_both_fail_both_count_and_the_next_attempt_is_new(hedged: Hedged) -> None:
    desk, again = hedged.desk, hedged.hedge()
    for who, held in (("w2", again), ("w1", hedged.slow)):
        desk.ask(who, m.GiveBack(group=held.group, lease=held.lease, outcome="fail", reason="test"))
    assert (hedged.group.phase, hedged.group.failures) == ("queued", 2)
    (third,) = desk.lease(1, 1)
    assert (third.group, third.attempt) == (hedged.slow.group, 3), "no attempt is used twice"
    hedged.check()


def test_a_group_that_a_filter_drops_is_dropped(hedged: Hedged) -> None:
    again = hedged.hedge()
    hedged.desk.ask("w2", m.GiveBack(group=again.group, lease=again.lease, outcome="drop", reason="filtered"))
    assert again.group not in hedged.desk.state.groups.by_id
    hedged.check()
    assert hedged.beat("w1", hedged.slow.lease) == [hedged.slow.lease]


def test_after_one_of_two_ended_the_group_may_be_hedged_again(hedged: Hedged) -> None:
    again = hedged.hedge()
    hedged.desk.ask("w2", m.Goodbye())
    hedged.desk.join("w3", "rollout")
    number = hedged.wait("w3")
    (third,) = hedged.desk.answers[number].groups
    assert (third.group, third.attempt) == (again.group, 3)
    hedged.check()


def test_both_leases_survive_the_broker(hedged: Hedged) -> None:
    again = hedged.hedge()
    hedged.desk.restart()
    hedged.check()
    assert hedged.beat("w2", again.lease) == []
    assert hedged.beat("w1", hedged.slow.lease) == []
    assert hedged.desk.put(again, 1, name="w2").result == "accepted"
    hedged.check()


def test_a_new_timeline_ends_both(hedged: Hedged) -> None:
    again = hedged.hedge()
    hedged.desk.join("t", "trainer", "2")
    hedged.desk.ask("t", m.Resume(step=0, version=0, lineage="M"))
    assert hedged.group.phase == "queued"
    hedged.check()
    assert hedged.beat("w1", hedged.slow.lease) == [hedged.slow.lease]
    assert hedged.beat("w2", again.lease) == [again.lease]


def test_a_worker_of_an_older_version_gets_no_second_lease(hedged: Hedged) -> None:
    number = hedged.wait(serving=0)
    hedged.desk.pass_time(500.0)
    assert number not in hedged.desk.answers


def test_a_worker_without_a_verified_version_gets_none(hedged: Hedged) -> None:
    number = hedged.wait(serving=m.NO_VERSION)
    hedged.desk.pass_time(500.0)
    assert number not in hedged.desk.answers


def test_new_groups_come_before_slow_ones(new_desk: Any) -> None:
    hedged = Hedged(new_desk, num_steps=None)
    hedged.desk.pass_time(31.0)
    number = hedged.wait()
    assert hedged.slow.group not in [g.group for g in hedged.desk.answers[number].groups]


def test_a_put_that_is_too_stale_leaves_the_group_to_the_newer_worker(new_desk: Any) -> None:
    hedged = Hedged(new_desk, max_staleness=1, num_steps=4)
    desk = hedged.desk
    for step in (1, 2):
        for group in desk.lease(4, step):
            desk.put(group, step)
        desk.train(step)  # version 3 is trained next; w1 still works with version 1
    number = hedged.wait(serving=3)
    desk.pass_time(31.0)
    (again,) = desk.answers[number].groups
    assert again.group == hedged.slow.group
    assert desk.put(hedged.slow, 1, name="w1").reason == "too stale; another worker still makes this group"
    assert (hedged.group.phase, hedged.group.lease) == ("leased", again.lease)
    hedged.check()
    assert desk.put(again, 3, name="w2").result == "accepted"
    assert hedged.slow.group in desk.batch(3)


def test_evaluations_are_never_hedged(new_desk: Any) -> None:
    from broker.state.rules import EvalDataset

    hedged = Hedged(new_desk, eval_datasets={"held": EvalDataset(num_prompts=1)}, eval_first=False)
    hedged.desk.put(hedged.slow, 1, name="w1")
    hedged.desk.ask("c", m.Evaluate(key="k"))
    number = hedged.wait("w1")
    assert hedged.desk.answers[number].groups[0].kind == "eval"
    number = hedged.wait("w2")
    hedged.desk.pass_time(500.0)
    assert number not in hedged.desk.answers


def test_a_prompt_that_kills_its_workers_comes_to_an_end(new_desk: Any) -> None:
    hedged = Hedged(new_desk, max_attempts=4)
    desk = hedged.desk
    for victim in range(20):
        desk.join(f"v{victim}", "rollout")
        hedged.wait(f"v{victim}")
        desk.pass_time(600.0)  # nobody who holds it is ever heard of again
        desk.ask("t", m.Heartbeat())
    assert desk.status["groups"]["dead"] >= 1
    assert hedged.slow.group not in desk.state.groups.by_id
    hedged.check()

"""Workers at any number that come, go, vanish and differ in speed, and what the group counts say about it."""

import random
from typing import Any

import pytest

from slimebus.bus import messages as m

STORM = 256


class Crowd:
    """Many workers at one desk. Every group that the trainer was given is remembered."""

    def __init__(self, new_desk: Any, seed: int = 0, **rules: Any) -> None:
        settings = {"prompts": 20_000, "batch_size": 32, "max_staleness": 2, "num_steps": 12, "lease_s": 30.0, "client_timeout_s": 40.0}
        self.desk = new_desk(**(settings | rules))
        self.random = random.Random(seed)
        self.desk.join("t", "trainer")
        assert self.desk.ask("t", m.Resume(step=0, version=0, lineage="L")) == m.Ok()
        self.desk.publish(0)
        self.held: dict[str, list[m.LeasedGroup]] = {}
        self.born = 0
        self.trained: list[str] = []

    def come(self, name: str = "") -> str:
        self.born += 1
        name = name or f"w{self.born}"
        self.desk.join(name, "rollout", str(self.born))
        self.held[name] = []
        return name

    def lease(self, name: str, want: int = 2, serving: int | None = None) -> None:
        newest = self.desk.state.meta.version if serving is None else serving
        self.held[name] += self.desk.lease(want, newest, name=name)

    def put(self, name: str) -> None:
        for group in self.held[name]:
            version = self.desk.state.groups.by_lease[group.lease].lease.version
            assert self.desk.put(group, version, name=name).result == "accepted"
        self.held[name] = []

    def beat(self, name: str) -> None:
        listed = [group.lease for group in self.held[name]]
        self.desk.ask(name, m.Heartbeat(lineage="L", serving=self.desk.state.meta.version, leases=listed))

    def leave(self, name: str) -> None:
        self.desk.ask(name, m.Goodbye())
        del self.held[name]

    def vanish(self, name: str) -> None:
        del self.held[name]

    def train(self) -> bool:
        step = self.desk.state.meta.next_step
        if step >= 12 or not self.desk.batch(step):
            return False
        self.trained += self.desk.train(step)
        return True

    def check(self) -> None:
        """Every prompt is in one place, every lease has a holder and a deadline."""
        state = self.desk.state
        live = set(state.groups.by_id)
        assert len(live) + state.meta.ended.get("dropped", 0) + state.meta.ended.get("dead", 0) == state.meta.cursor
        leases = {g.lease.id for g in state.groups.by_id.values() if g.phase == "leased"}
        assert leases == set(state.groups.by_lease) == set(state.leases.held_since)
        assert len(self.trained) == len(set(self.trained))


@pytest.mark.parametrize("seed", range(3))
def test_256_workers_come_and_go_and_every_prompt_is_trained_once(new_desk: Any, seed: int) -> None:
    crowd = Crowd(new_desk, seed, max_attempts=50)
    for _ in range(STORM):
        crowd.come()
    for turn in range(400):
        for name in list(crowd.held):
            fate = crowd.random.random()
            if fate < 0.05:
                crowd.leave(name)
            elif fate < 0.1:
                crowd.vanish(name)
            elif fate < 0.15:
                crowd.come(name)  # restarted under its name: what it held is queued again
            elif fate < 0.6 and crowd.held[name]:
                crowd.put(name)
            else:
                crowd.beat(name)
                crowd.lease(name)
        while len(crowd.held) < STORM // 4:
            crowd.come()
        crowd.desk.pass_time(5.0)
        for name, groups in crowd.held.items():  # those whose lease ran out hear of it with their next heartbeat
            crowd.held[name] = [g for g in groups if g.lease in crowd.desk.state.groups.by_lease]
        while crowd.train():
            pass
        if turn % 10 == 0:
            crowd.check()
        if len(crowd.trained) == 12 * 32:
            break
    crowd.check()
    assert len(crowd.trained) == 12 * 32
    for name in list(crowd.held):
        crowd.leave(name)
    crowd.check()
    assert not crowd.desk.state.groups.by_lease
    assert not crowd.desk.state.waiting_leases
    assert crowd.desk.status["groups"]["dead"] == 0


def test_everybody_vanishes_at_once_and_whoever_comes_makes_their_groups(new_desk: Any) -> None:
    crowd = Crowd(new_desk)
    for _ in range(48):
        crowd.come()
    for name in crowd.held:
        crowd.lease(name)
    lost = {g.group for groups in crowd.held.values() for g in groups}
    assert len(lost) == 96
    crowd.held.clear()
    crowd.desk.pass_time(31.0)
    crowd.check()
    assert crowd.desk.status["groups"]["leased"] == 0
    crowd.come("late")
    crowd.lease("late", want=96)
    assert {g.group for g in crowd.held["late"]} == lost
    crowd.put("late")
    while crowd.train():
        pass
    assert lost <= set(crowd.trained)


def test_a_worker_far_behind_gets_nothing_that_it_cannot_use(new_desk: Any) -> None:
    crowd = Crowd(new_desk, max_staleness=1)
    fast, slow = crowd.come("fast"), crowd.come("slow")
    for step in range(4):
        crowd.lease(fast, want=32)
        crowd.put(fast)
        assert crowd.train(), step
        crowd.lease(slow, serving=0)
        assert (len(crowd.held[slow]) > 0) == (step < 1), f"version 0 is of no use once version {step + 1} is trained"
        crowd.held[slow] = []
        for group in crowd.desk.state.groups.leased_by(slow):
            crowd.desk.ask(slow, m.GiveBack(group=group.id, lease=group.lease.id, outcome="requeue", reason="slow"))
    waits = crowd.desk.send(slow, m.Lease(want=1, wait_s=60.0, lineage="L", serving=0))
    assert waits not in crowd.desk.answers
    crowd.desk.ask(slow, m.Heartbeat(lineage="L", serving=4))  # it has caught up
    crowd.desk.pass_time(0.0)
    assert crowd.desk.answers[waits].groups
    assert "stale" not in crowd.desk.status["waste"]


def test_slow_and_fast_workers_together_waste_nothing(new_desk: Any) -> None:
    crowd = Crowd(new_desk, batch_size=4, max_staleness=2, num_steps=12)
    fast, slow = crowd.come("fast"), crowd.come("slow")
    crowd.lease(slow, want=2)
    turn = 0
    while len(crowd.trained) < 48:
        turn += 1
        crowd.lease(fast, want=3)
        crowd.put(fast)
        crowd.beat(slow)
        if turn % 2 == 0:
            crowd.put(slow)
            crowd.lease(slow, want=2)
        crowd.desk.pass_time(1.0)
        crowd.train()
        assert turn < 200
    assert not crowd.desk.status["waste"]
    assert {group.lease.worker for group in crowd.desk.state.groups.by_id.values()} >= {"fast", "slow"}


def test_a_worker_that_drains_is_given_nothing_more_once_it_has_left(new_desk: Any) -> None:
    crowd = Crowd(new_desk)
    name = crowd.come()
    waits = crowd.desk.send(name, m.Lease(want=1, wait_s=60.0, lineage="L", serving=m.NO_VERSION))
    crowd.leave(name)
    crowd.desk.publish(0)
    assert waits not in crowd.desk.answers
    assert not crowd.desk.state.waiting_leases
    assert not crowd.desk.state.groups.by_lease

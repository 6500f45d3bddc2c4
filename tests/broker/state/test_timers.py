"""Deadlines: when they fall due, and how much they hold."""

import random

from broker.state.timers import SLACK, Timers


def test_deadlines_fall_due_in_order_and_once() -> None:
    timers = Timers()
    timers.set("a", 3.0)
    timers.set("b", 1.0)
    timers.set("a", 2.0)
    assert list(timers.due(0.5)) == []
    assert list(timers.due(2.5)) == ["b", "a"]
    assert list(timers.due(9.0)) == []


def test_a_moved_deadline_holds_the_later_time_and_a_cancelled_one_never_comes() -> None:
    timers = Timers()
    timers.set("a", 1.0)
    timers.set("b", 1.0)
    timers.set("a", 5.0)
    timers.cancel("b")
    assert list(timers.due(4.0)) == []
    assert list(timers.due(5.0)) == ["a"]


def test_memory_follows_the_deadlines_that_are_alive() -> None:
    timers = Timers()
    for i in range(50_000):
        timers.set(("parked lease", i), 600.0)
        timers.cancel(("parked lease", i))
    assert len(timers._heap) <= SLACK + 1
    assert len(timers._queued) <= SLACK + 1


def test_throwing_out_the_dead_changes_no_deadline() -> None:
    chance, timers, wanted = random.Random(1), Timers(), {}
    for i in range(20_000):
        key = chance.randrange(500)
        if chance.random() < 0.5:
            wanted[key] = float(chance.randrange(10, 1000))
            timers.set(key, wanted[key])
        else:
            wanted.pop(key, None)
            timers.cancel(key)
        assert len(timers) == len(wanted), i
    for now in range(10, 1000):
        due = sorted(map(str, timers.due(float(now))))
        assert due == sorted(str(key) for key, deadline in wanted.items() if deadline == now)

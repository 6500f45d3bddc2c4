"""The decode thread: takes actions between steps, sleeps when there is nothing, reports its own death."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.embedded.core import DecodeLoop


class FakeCore:
    """`work` steps remain; each is counted. A step may be made to fail."""

    def __init__(self) -> None:
        self.work, self.steps, self.is_paused, self.num_generated = 0, 0, False, 0
        self.failure: Exception | None = None
        self.scheduler = SimpleNamespace(running=[], waiting=[])

    @property
    def has_work(self) -> bool:
        return self.work > 0

    def step(self) -> list[Any]:
        if self.failure:
            raise self.failure
        self.work, self.steps = self.work - 1, self.steps + 1
        return [f"sequence {self.steps}"]


class Running:
    """A started loop on a fake core, and what it told."""

    def __init__(self) -> None:
        self.core, self.told, self.failures, self.has_failed = FakeCore(), [], [], threading.Event()
        self.loop = DecodeLoop(self.core, self.told.extend, self.fail)  # type: ignore[arg-type]
        self.loop.start()

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.has_failed.set()


@pytest.fixture
def running():
    running = Running()
    yield running
    assert running.loop.stop(5)


def set_work(steps: int):
    def action(core: Any) -> None:
        core.work = steps

    return action


def test_an_action_that_brings_work_starts_the_steps_and_each_is_told(running: Running):
    running.loop.call(set_work(3)).result(5)
    while running.core.work:
        time.sleep(0.001)
    running.loop.call(lambda core: None).result(5)
    assert running.told == ["sequence 1", "sequence 2", "sequence 3"]


def test_an_actions_error_goes_to_its_caller_and_the_loop_lives(running: Running):
    with pytest.raises(ZeroDivisionError):
        running.loop.call(lambda core: 1 // 0).result(5)
    assert running.loop.call(lambda core: core.steps).result(5) == 0


def test_a_step_that_fails_is_reported(running: Running):
    def breaks(core: Any) -> None:
        core.failure, core.work = MemoryError("no memory"), 1

    running.loop.call(breaks)
    assert running.has_failed.wait(5)
    assert [str(error) for error in running.failures] == ["no memory"]
    assert running.loop.stop(5)


def test_stop_ends_a_busy_loop(running: Running):
    running.loop.call(set_work(1 << 60))
    assert running.loop.stop(5)
    assert running.core.work > 0


def test_an_action_whose_caller_is_gone_is_done_all_the_same_and_the_thread_goes_on(running: Running):
    is_held, done = threading.Event(), []
    running.loop.call(lambda core: is_held.wait(5))
    gone = running.loop.call(lambda core: done.append("result"))
    failing = running.loop.call(lambda core: 1 / 0)
    gone.cancel()
    failing.cancel()
    is_held.set()
    running.loop.call(lambda core: None).result(5)
    assert (done, running.failures) == (["result"], [])

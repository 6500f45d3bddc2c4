"""A loop that one call blocks is named with its line, and ended where it must be; one that is only slow is not."""

import asyncio
import logging
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from manual_clock import ManualClock

from slimebus.process.loop_watch import CHECK_EVERY_S, LEAVE_BLOCKED_S, MAX_CHECK_S, WARN_S, LoopWatch, progress_of


class Watched:
    """A watch with a loop and a clock that the test moves."""

    def __init__(self, **limits: Any) -> None:
        self.clock, self.turns, self.signals, self.ended = ManualClock(), 0, 0, list[str]()
        self.watch = LoopWatch(
            "the loop", lambda: self.turns, on_signal=self.signal, on_end=lambda why, is_blocked: self.ended.append(why),
            who=lambda: "hook probe.py:generate", clock=self.clock.monotonic, end_process=lambda code: None, **limits,
        )  # fmt: skip

    def signal(self) -> None:
        self.signals += 1

    def block(self, seconds: float) -> None:
        """The loop does not get on, and the watch looks as often as it should."""
        for _ in range(round(seconds / CHECK_EVERY_S)):
            self.clock.advance(CHECK_EVERY_S)
            self.watch.check_progress()

    def work(self, seconds: float) -> None:
        for _ in range(round(seconds / CHECK_EVERY_S)):
            self.turns += 1
            self.block(CHECK_EVERY_S)


def block_in(file: Path, watched: Watched, seconds: float) -> None:
    """The main thread is in line 2 of a user's file while the loop stands still."""
    file.write_text("def generate(entered, done):\n    entered.set(); done.wait()\n")
    names: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    entered, done = threading.Event(), threading.Event()

    def watch() -> None:
        entered.wait()
        watched.block(seconds)
        done.set()

    threading.Thread(target=watch).start()
    names["generate"](entered, done)


def test_a_loop_that_is_blocked_is_named_once_with_the_users_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.work(30)
    watched.block(WARN_S - CHECK_EVERY_S)
    assert (watched.watch.blocked_s, watched.watch.blocked_at, caplog.messages) == (0.0, "", [])
    watched.work(1)
    with caplog.at_level(logging.INFO):
        block_in(tmp_path / "probe.py", watched, 40)
        assert (watched.watch.blocked_s, watched.watch.blocked_at) == (40, f"{tmp_path}/probe.py:2")
        watched.work(1)
    assert (watched.watch.blocked_s, watched.watch.blocked_at) == (0.0, "")
    warned, goes_on = caplog.messages
    assert warned == f"the loop has been blocked for 5 s by hook probe.py:generate at {tmp_path}/probe.py:2"
    assert goes_on == "the loop goes on"
    assert not watched.ended


def test_a_loop_that_is_blocked_for_its_limit_ends_the_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.block(10_000)
    assert not watched.ended, "without a limit it only warns"
    watched.work(1)
    watched.watch.limit_s = 60.0
    watched.block(59)
    assert not watched.ended
    watched.work(1)
    block_in(tmp_path / "probe.py", watched, 60)
    assert watched.ended == [f"the loop was blocked for 60 s by hook probe.py:generate at {tmp_path}/probe.py:2"]
    assert "entered.set(); done.wait()" in caplog.messages[-1], "the stack"


def test_time_in_which_the_watch_did_not_run_either_is_not_the_loops() -> None:
    watched = Watched()
    watched.watch.limit_s = 60.0
    watched.work(3)
    for _ in range(4):  # suspended for an hour, again and again
        watched.clock.advance(3600)
        watched.watch.check_progress()
        assert watched.watch._stood_s <= MAX_CHECK_S
        watched.turns += 1
    assert not watched.ended
    assert watched.watch.blocked_s == 0


def test_a_debugger_may_hold_the_loop_as_long_as_it_likes() -> None:
    watched = Watched()
    watched.watch.limit_s = 10.0
    names: dict[str, Any] = {"__name__": "bdb"}
    exec("def stop(block):\n    block()\n", names)
    names["stop"](lambda: watched.block(100))
    assert not watched.ended


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_a_loop_that_cannot_hear_it_ended(number: signal.Signals) -> None:
    watched = Watched(grace_s=40.0)
    watched.watch.handle_signal(number)
    assert (watched.signals, watched.watch.is_leaving) == (1, True)
    watched.work(30)
    assert not watched.ended, "it leaves in its own way"
    watched.block(LEAVE_BLOCKED_S)
    assert len(watched.ended) == 1


def test_a_process_that_was_blocked_before_the_signal_ends_at_once() -> None:
    watched = Watched()
    watched.block(100)
    watched.watch.handle_signal(signal.SIGTERM)
    watched.watch.check_progress()
    assert len(watched.ended) == 1


def test_a_process_that_works_on_after_its_grace_is_ended() -> None:
    watched = Watched(grace_s=40.0)
    watched.work(100)
    watched.watch.leave()
    watched.work(39)
    watched.watch.leave()
    assert not watched.ended
    watched.work(1)
    assert watched.ended[0].startswith("asked to leave 40 s ago and still running; the main thread is at ")


def test_more_sigterms_do_not_disturb_the_leaving_and_a_second_ctrl_c_ends_it() -> None:
    watched = Watched()
    for _ in range(3):
        watched.watch.handle_signal(signal.SIGTERM)
    watched.watch.check_progress()
    assert not watched.ended
    watched.watch.handle_signal(signal.SIGINT)
    assert watched.ended == ["interrupted again while it was leaving"]


def test_an_event_loop_gets_on_while_it_is_idle_and_while_many_slow_tasks_share_a_turn() -> None:
    """And does not within one call. Seen from another thread, as the watch does."""
    seen: dict[str, set[Any]] = {"idle": set(), "busy": set(), "blocked": set()}
    now = "idle"

    async def slow() -> None:
        time.sleep(0.1)

    async def run() -> None:
        nonlocal now
        progress, ended = progress_of(asyncio.get_running_loop()), threading.Event()

        def look() -> None:
            while not ended.wait(0.01):
                seen[now].add(progress())

        watching = threading.Thread(target=look)
        watching.start()
        await asyncio.sleep(3 * CHECK_EVERY_S)
        now = "busy"
        await asyncio.gather(*(slow() for _ in range(10)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now = "blocked"
        time.sleep(2 * CHECK_EVERY_S)
        ended.set()
        watching.join()

    asyncio.run(run())
    assert len(seen["idle"]) >= 3
    assert len(seen["busy"]) >= 5
    assert len(seen["blocked"]) == 1

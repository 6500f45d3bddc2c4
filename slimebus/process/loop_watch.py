"""Watches the loop of the main thread from a thread of its own: in a loop that one call blocks nothing else runs, signal handlers neither.

    loop --progress--> LoopWatch <--SIGTERM, SIGINT (wakeup fd)
                         no progress for WARN_S:    a line of the log names the user's file and line
                         no progress for limit_s, or still running `grace_s` after it was asked to leave:  stack, on_end, os._exit

A call that holds the interpreter itself (C code, a regular expression) stops this thread too.
"""

import asyncio
import itertools
import logging
import math
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from slimebus.bus.errors import EXIT_FAILURE
from slimebus.hooks.hooks import user_line

log = logging.getLogger("slimebus")

CHECK_EVERY_S = 1.0
MAX_CHECK_S = 2 * CHECK_EVERY_S
"""What counts of the time between two looks: a thread that looks later was stopped itself (a suspended machine, a held interpreter)."""
WARN_S = 5.0
LEAVE_BLOCKED_S = 5.0
"""A process that has to leave is ended when its loop is blocked so long."""


class LoopWatch:
    """One a process. what: the loop, for people. It only warns, until `limit_s` is set or the process has to leave.

    progress: gives something else each time that the loop gets on. who: what it is calling, where that is known. on_signal: what a SIGTERM
    or the first SIGINT asks for. on_end: the last thing that is done, with why, and whether the loop is blocked. All but `progress` are
    called from this thread alone. grace_s, leave_blocked_s: what a process that has to leave gets, and one that is blocked then.
    """

    def __init__(
        self, what: str, progress: Callable[[], object], *, on_signal: Callable[[], None],
        on_end: Callable[[str, bool], None] = lambda why, is_blocked: None, who: Callable[[], str] = lambda: "",
        grace_s: float = math.inf, leave_blocked_s: float = LEAVE_BLOCKED_S,
        clock: Callable[[], float] = time.monotonic, end_process: Callable[[int], object] = os._exit,
    ) -> None:  # fmt: skip
        self.what, self.progress, self.on_signal, self.on_end, self.who = what, progress, on_signal, on_end, who
        self.limit_s, self.grace_s, self.leave_blocked_s = math.inf, grace_s, leave_blocked_s
        self.clock, self.end_process = clock, end_process
        self.exit_code = EXIT_FAILURE
        """Of a process that has to be ended."""
        self.is_leaving = False
        self.blocked_at = ""
        """FILE:LINE where the loop has been for WARN_S or longer."""
        self._main = threading.main_thread().ident or 0
        self._seen, self._checked_at = progress(), clock()
        self._stood_s = self._leaving_s = 0.0

    @property
    def blocked_s(self) -> float:
        """For how long the loop has been blocked; 0: it is not, or not for WARN_S yet."""
        return self._stood_s if self.blocked_at else 0.0

    def leave(self) -> None:
        """From now on the process has `grace_s` left."""
        self.is_leaving = True

    def start(self) -> None:
        """Begin. To be called in the main thread, and inside of an event loop that has a wakeup fd of its own."""
        signals, wakeup = os.pipe()
        os.set_blocking(wakeup, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(signals,), name="loop-watch", daemon=True).start()

    def _watch(self, signals: int) -> None:
        while True:
            for number in os.read(signals, 64) if select.select([signals], [], [], CHECK_EVERY_S)[0] else b"":
                self.handle_signal(number)
            self.check_progress()

    def handle_signal(self, number: int) -> None:
        """Act on a signal. More SIGTERMs do not disturb the leaving: the kernel may send several when a parent is killed."""
        if number == signal.SIGINT and self.is_leaving:
            self._end_process("interrupted again while it was leaving")
        elif number in (signal.SIGTERM, signal.SIGINT):
            self.leave()
            self.on_signal()

    def check_progress(self) -> None:
        """Measure, warn and end the process, as far as it is time for that."""
        now = self.clock()
        passed_s, self._checked_at = min(now - self._checked_at, MAX_CHECK_S), now
        seen, before = self.progress(), self._seen
        self._seen, self._stood_s = seen, self._stood_s + passed_s if seen == before else 0.0
        self._leaving_s += passed_s if self.is_leaving else 0.0
        if self._stood_s >= WARN_S and not self.blocked_at:
            self.blocked_at = self._current_line()
            log.warning("%s has been blocked for %.0f s %s", self.what, self._stood_s, self._blocked_where())
        elif self.blocked_at and not self._stood_s:
            log.info("%s goes on", self.what)
            self.blocked_at = ""
        if self.blocked_s >= min(self.limit_s, self.leave_blocked_s if self.is_leaving else math.inf) and not _is_debugged(
            self._main_frame()
        ):
            self._end_process(f"{self.what} was blocked for {self.blocked_s:.0f} s {self._blocked_where()}", is_blocked=True)
        elif self._leaving_s >= self.grace_s:
            self._end_process(f"asked to leave {self._leaving_s:.0f} s ago and still running; the main thread is at {self._current_line()}")

    def _blocked_where(self) -> str:
        who = self.who()
        return f"by {who} at {self.blocked_at}" if who else f"at {self.blocked_at}"

    def _main_frame(self) -> FrameType | None:
        return sys._current_frames().get(self._main)

    def _current_line(self) -> str:
        """FILE:LINE of the innermost frame that is the user's; else of the innermost of all."""
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(self._main_frame())][::-1]
        return user_line(frames) or ":".join(map(str, frames[-1]))

    def _end_process(self, why: str, *, is_blocked: bool = False) -> None:
        log.error("%s; the stack of the main thread:\n%s", why, "".join(traceback.format_stack(self._main_frame())).rstrip())
        try:
            self.on_end(why, is_blocked)
        finally:  # what is wrong with the process may be wrong with this, too
            self.end_process(self.exit_code)


def progress_of(loop: asyncio.AbstractEventLoop) -> Callable[[], object]:
    """The progress of a running event loop: its turns, and the task that runs, as a turn of many slow ones takes long."""
    turns, current = itertools.count(), 0

    def tick() -> None:
        nonlocal current
        current = next(turns)
        loop.call_later(CHECK_EVERY_S / 2, tick)

    tick()
    return lambda: (current, id(asyncio.current_task(loop)))


def _is_debugged(frame: FrameType | None) -> bool:
    """True while somebody holds the main thread at a prompt of a debugger."""
    return "pydevd" in sys.modules or any(one.f_globals.get("__name__") == "bdb" for one, _ in traceback.walk_stack(frame))

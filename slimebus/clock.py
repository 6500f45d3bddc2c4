"""Time as an argument, so that decisions and tests can be driven without waiting."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where a process gets the time from."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""

    def wall(self) -> float:
        """Seconds since the epoch, for people and records."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that a test moves."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self.now += seconds

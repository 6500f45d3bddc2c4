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

"""Time as an argument, so that decisions and tests can be driven without waiting."""

from typing import Protocol


class Clock(Protocol):
    """Where a process gets the time from: the module `time`, or a test's own."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""

    def time(self) -> float:
        """Seconds since the epoch, for people and records."""

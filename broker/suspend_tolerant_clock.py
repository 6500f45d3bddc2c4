"""Broker time, which stops while the machine is suspended, and when deadlines may be checked."""

from typing import Protocol


class Clock(Protocol):
    """Where a process gets the time from: the module `time`, or a test's own."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""

    def time(self) -> float:
        """Seconds since the epoch, for people and records."""


LONGEST_TURN_S = 2.0
"""More than any turn of a healthy broker takes: it looks around twice a second."""
MAX_UNCHECKED_S = 1.0
"""While requests come faster than they are read, deadlines are looked at once in this time all the same."""


class SuspendTolerantClock:
    """Seconds in which the broker was awake: a longer gap between two turns counts as `LONGEST_TURN_S`.

    While the process was stopped, its machine asleep or its disk stuck, heartbeats waited unread; had that time counted, every
    lease would be over before the first of them is read. A clock that jumps, either way, changes as little.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.now, self.checked_at = clock, 0.0, 0.0
        self._seen = clock.monotonic()

    def advance(self) -> float:
        """The time now; called at least once a turn."""
        seen = self.clock.monotonic()
        passed_s, self._seen = seen - self._seen, seen
        self.now += min(max(0.0, passed_s), LONGEST_TURN_S)
        if not 0 <= passed_s <= LONGEST_TURN_S:
            self.checked_at = self.now
        return self.now

    def may_check_deadlines(self, *, all_heard: bool) -> bool:
        """True when deadlines may be looked at: everything that had arrived is read, or they waited long enough."""
        is_time = all_heard or self.now - self.checked_at >= MAX_UNCHECKED_S
        if is_time:
            self.checked_at = self.now
        return is_time

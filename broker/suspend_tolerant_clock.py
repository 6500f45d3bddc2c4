"""Broker time, which stops while the machine is suspended, and until when deadlines may be checked."""

from typing import Protocol


class Clock(Protocol):
    """Where a process gets the time from: the module `time`, or a test's own."""

    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean something."""

    def time(self) -> float:
        """Seconds since the epoch, for people and records."""


LONGEST_TURN_S = 2.0
"""More than any turn of a healthy broker takes: it looks around twice a second."""
MAX_UNREAD_S = 10.0
"""Longer than a message waits in the sockets of a healthy broker, also under load."""


class SuspendTolerantClock:
    """Seconds in which the broker was awake: a longer gap between two turns counts as `LONGEST_TURN_S`.

    While the process was stopped, its machine asleep or its disk stuck, heartbeats waited unread; had that time counted, every
    lease would be over before the first of them is read. A clock that jumps, either way, changes as little.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.now, self._all_heard_at = clock, 0.0, 0.0
        self._seen = clock.monotonic()

    def advance(self) -> float:
        """The time now; called at least once a turn."""
        seen = self.clock.monotonic()
        passed_s, self._seen = seen - self._seen, seen
        self.now += min(max(0.0, passed_s), LONGEST_TURN_S)
        return self.now

    def heard_until(self, *, all_heard: bool) -> float:
        """What fell due until then may be acted on: a message that was sent in time has been read.

        all_heard: by now, everything that had arrived. While messages come faster than they are read, or a slow disk cuts each turn
        short, heartbeats wait unread, for MAX_UNREAD_S at most: connections are read in turn.
        """
        if all_heard:
            self._all_heard_at = self.now
        return max(self._all_heard_at, self.now - MAX_UNREAD_S)

"""Time as the broker lived it."""

from slimebus.clock import Clock

LONGEST_TURN_S = 2.0
"""More than any turn of a healthy broker takes: it looks around twice a second."""


class AwakeClock:
    """Seconds in which the broker was awake: a longer gap between two turns counts as `LONGEST_TURN_S`.

    While the process was stopped, its machine asleep or its disk stuck, heartbeats waited unread; had that time counted, every
    lease would be over before the first of them is read. A clock that jumps, either way, changes as little.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.now = clock, 0.0
        self._seen = clock.monotonic()

    def advance(self) -> float:
        """The time now; call it once a turn."""
        seen = self.clock.monotonic()
        self.now += min(max(0.0, seen - self._seen), LONGEST_TURN_S)
        self._seen = seen
        return self.now

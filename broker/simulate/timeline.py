"""Virtual time: one queue of what happens next."""

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class Timeline:
    """Everything that will happen, in order. `now` is the true time, in seconds from the start of the world."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Act]] = []
        self._serial = 0

    def later(self, delay_s: float, act: Act) -> None:
        """Have `act` happen `delay_s` from now; what is due together happens in the order it was asked for."""
        heapq.heappush(self._queue, (self.now + delay_s, self.serial(), act))

    def serial(self) -> int:
        """A number that nobody else has."""
        self._serial += 1
        return self._serial

    def next_at(self) -> float:
        """When the next thing happens; infinity when nothing will."""
        return self._queue[0][0] if self._queue else float("inf")

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, act = heapq.heappop(self._queue)
        act()

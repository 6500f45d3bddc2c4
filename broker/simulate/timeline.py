"""Virtual time: one queue of what happens next."""

import heapq
from collections.abc import Callable

Act = Callable[[], None]


class Timeline:
    """Everything that will happen, in order. `now` is the true time, in seconds from the start of the world.

    Work takes its own seconds as long as `pace` is 1, and longer while processes share too few cores; `worked` is the clock of all work.
    """

    def __init__(self) -> None:
        self.now = self.worked = 0.0
        self.pace = 1.0
        """Seconds of work done a second; it may be changed at any time."""
        self._queue: list[tuple[float, int, Act]] = []
        self._work: list[tuple[float, int, Act]] = []
        self._serial = 0

    def later(self, delay_s: float, act: Act) -> None:
        """Have `act` happen `delay_s` from now; what is due together happens in the order it was asked for."""
        heapq.heappush(self._queue, (self.now + delay_s, self.serial(), act))

    def after_work(self, work_s: float, act: Act) -> None:
        """Have `act` happen after so many seconds of work."""
        heapq.heappush(self._work, (self.worked + work_s, self.serial(), act))

    def serial(self) -> int:
        """A number that nobody else has."""
        self._serial += 1
        return self._serial

    def next_at(self) -> float:
        """When the next thing happens; infinity when nothing will."""
        return min(self._queue[0][0] if self._queue else float("inf"), self._worked_at())

    def step(self) -> None:
        """Let the next thing happen."""
        worked_at = self._worked_at()
        if not self._queue or worked_at < self._queue[0][0]:
            self.now = worked_at
            self.worked, _, act = heapq.heappop(self._work)
        else:
            at, _, act = heapq.heappop(self._queue)
            self.worked += (at - self.now) * self.pace
            self.now = at
        act()

    def _worked_at(self) -> float:
        """When the next work is done."""
        return self.now + max(0.0, self._work[0][0] - self.worked) / self.pace if self._work else float("inf")

"""Every group with samples, in the order in which they arrived: what the cursors of consumers walk along."""

import bisect
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Arrived(Protocol):
    """What has a position."""

    arrival: int


T = TypeVar("T", bound=Arrived)


class Arrivals(Generic[T]):
    """Positions rise by one with each put that was accepted and are never given twice. `changes` rises when there may be more to read."""

    def __init__(self) -> None:
        self.changes = 0
        self._groups: dict[int, T] = {}
        self._positions: list[int] = []

    def __len__(self) -> int:
        return len(self._positions)

    def add(self, group: T) -> None:
        """Take in a group at its position."""
        self._groups[group.arrival] = group
        if self._positions and self._positions[-1] > group.arrival:
            bisect.insort(self._positions, group.arrival)
        else:
            self._positions.append(group.arrival)
        self.changes += 1

    def remove(self, group: T) -> None:
        """Let go of a group: its samples are gone, or it is."""
        del self._groups[group.arrival]
        del self._positions[bisect.bisect_left(self._positions, group.arrival)]
        self.changes += 1

    def after(self, position: int) -> Iterator[T]:
        """The groups behind a position, in order."""
        for i in range(bisect.bisect_right(self._positions, position), len(self._positions)):
            yield self._groups[self._positions[i]]

    def num_after(self, position: int) -> int:
        """How many groups stand behind a position."""
        return len(self._positions) - bisect.bisect_right(self._positions, position)

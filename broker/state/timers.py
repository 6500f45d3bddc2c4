"""Deadlines by key, with cheap extension."""

import heapq
import math
from collections.abc import Hashable, Iterator, Set

Key = tuple[str, Hashable]
"""What falls due, and its subject."""
SLACK = 1024
"""Forgotten deadlines that may lie about in the heap, beside as many as are alive."""


class Timers:
    """Deadlines that may move; moving one later costs a dictionary write."""

    def __init__(self) -> None:
        self._deadline: dict[Key, float] = {}
        self._queued: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def set(self, key: Key, deadline: float) -> None:
        """Have `key` fall due at `deadline`, in place of what was set before."""
        self._deadline[key] = deadline
        if deadline < self._queued.get(key, math.inf):
            self._serial += 1
            self._queued[key] = deadline
            heapq.heappush(self._heap, (deadline, self._serial, key))

    def cancel(self, key: Key) -> None:
        """Forget `key`; unknown keys are fine."""
        self._deadline.pop(key, None)
        if len(self._heap) > 2 * len(self._deadline) + SLACK:
            self._remove_cancelled()

    def deadline(self, *keys: Key) -> float:
        """The deadline of the first of these that has one; infinity where none has."""
        for key in keys:
            if key in self._deadline:
                return self._deadline[key]
        return math.inf

    def due(self, now: float) -> Iterator[Key]:
        """The keys that are due; each is forgotten as it is given."""
        while self._heap and self._heap[0][0] <= now:
            queued, _, key = heapq.heappop(self._heap)
            if self._queued.get(key) == queued:
                del self._queued[key]
            deadline = self._deadline.get(key)
            if deadline is None:
                continue
            if deadline > now:
                self.set(key, deadline)
                continue
            del self._deadline[key]
            yield key

    def next(self) -> float | None:
        """When to look again, at the latest; may be early, never late."""
        return self._heap[0][0] if self._heap else None

    def keys(self) -> Set[Key]:
        """What has a deadline."""
        return self._deadline.keys()

    def __len__(self) -> int:
        return len(self._deadline)

    def _remove_cancelled(self) -> None:
        """Throw out what was cancelled or moved, so that memory follows the deadlines that are set and not those that ever were."""
        live = [entry for entry in self._heap if entry[2] in self._deadline and self._queued.get(entry[2]) == entry[0]]
        self._queued = {key: queued for queued, _, key in live}
        self._heap = live
        heapq.heapify(self._heap)

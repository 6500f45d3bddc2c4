"""Who waits and who runs. Order is first come, first served; retracted sequences go first."""

from collections import deque
from collections.abc import Callable

from rollout.embedded.sequence import Sequence

FULL_BATCH_SHARE = 16  # rows that must be free before a full batch admits again: 1 of so many

Place = Callable[[Sequence, int], bool]
"""Finds a sequence room in the cache, and what that knows of its tokens; False: there is no room, or more than so many are unknown."""


class Scheduler:
    """Waiting queue and running sequences, one a row; `place` gives it its part of the cache. Whoever adds bounds the queue."""

    def __init__(self, *, max_running: int, max_prefill_tokens: int, place: Place) -> None:
        self.max_running, self.max_prefill_tokens = max_running, max_prefill_tokens
        self._place = place
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        """Append to the queue, in order."""
        self.waiting.extend(sequences)

    def admit(self) -> tuple[list[Sequence], list[Sequence]]:
        """Move the next sequences from waiting to running: (those that only decode, those to prefill), in the order of their rows.

        As many as rows, cache and one prefill batch allow. One whose tokens are all known but the last needs no prefill; one that equals
        another of this prefill waits for the next step, when it is such. While the rows are full and the queue is deep, it waits for
        several free rows, for a prefill of few costs almost as much as one of many.
        """
        known: list[Sequence] = []
        new: dict[object, Sequence] = {}
        equal: list[Sequence] = []
        longest = 0
        num_free = self.max_running - len(self.running)
        if num_free < min(len(self.waiting), self.max_running // FULL_BATCH_SHARE):
            return [], []
        while self.waiting and len(known) + len(new) < num_free:
            sequence = self.waiting[0]
            name = sequence if sequence.is_scored else (sequence.cache_key, *sequence.tokens)
            if name in new:
                equal.append(self.waiting.popleft())
                continue
            most_new = self.max_prefill_tokens // (len(new) + 1) if new else len(sequence.tokens)
            if not self._place(sequence, most_new if longest <= most_new else 1):
                break
            longest = max(longest, num_new := len(sequence.tokens) - sequence.num_known)
            if num_new == 1 and sequence.limit:
                known.append(self.waiting.popleft())
                continue
            new[name] = self.waiting.popleft()
        self.waiting.extendleft(reversed(equal))
        self.running += [*known, *new.values()]
        return known, list(new.values())

    def remove_running(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Drop the sequences in `rows`; the last ones move into the holes. (source rows, target rows) of the moves."""
        gone = set(rows)
        num_left = len(self.running) - len(gone)
        sources = [row for row in range(num_left, len(self.running)) if row not in gone]
        targets = [row for row in sorted(gone) if row < num_left]
        for source, target in zip(sources, targets, strict=True):
            self.running[target] = self.running[source]
        del self.running[num_left:]
        return sources, targets

    def remove_waiting(self, is_removed: Callable[[Sequence], bool]) -> list[Sequence]:
        """Drop and return the waiting sequences that the predicate selects."""
        removed = [sequence for sequence in self.waiting if is_removed(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not is_removed(sequence))
        return removed

    def retract_all(self) -> None:
        """Put every running sequence back at the head of the queue, oldest first."""
        for sequence in sorted(self.running, key=lambda sequence: sequence.created_s, reverse=True):
            sequence.num_retractions += 1
            self.waiting.appendleft(sequence)
        self.running.clear()

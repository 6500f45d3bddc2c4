"""Who waits and who runs. Order is first come, first served; retracted sequences go first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rollout.embedded.sequence import Sequence

FULL_BATCH_SHARE = 16  # rows that must be free before a full batch admits again: 1 of so many

Fits = Callable[[int, int], bool]  # (rows, tokens a row) -> whether the cache holds them


class Scheduler:
    """Waiting queue and running sequences, one a row; `fits` says what the cache can hold. Whoever adds bounds the queue."""

    def __init__(self, *, max_running: int, max_prefill_tokens: int, fits: Fits) -> None:
        self.max_running, self.max_prefill_tokens = max_running, max_prefill_tokens
        self._fits = fits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        """Append to the queue, in order."""
        self.waiting.extend(sequences)

    def admit(self) -> list[Sequence]:
        """Move the next sequences from waiting to running: as many as rows, cache and one prefill batch allow.

        While the rows are full and the queue is deep, it waits for several free rows, for a prefill of few costs almost
        as much as one of many.
        """
        admitted: list[Sequence] = []
        num_free = self.max_running - len(self.running)
        if num_free < min(len(self.waiting), self.max_running // FULL_BATCH_SHARE):
            return admitted
        longest_prompt = 0
        longest = max((sequence.max_tokens for sequence in self.running), default=0)
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            longest_prompt = max(longest_prompt, len(sequence.prompt) + len(sequence.output_ids))
            longest = max(longest, sequence.max_tokens)
            is_too_much = admitted and longest_prompt * (len(admitted) + 1) > self.max_prefill_tokens
            if is_too_much or not self._fits(len(self.running) + 1, longest):
                break
            admitted.append(self.waiting.popleft())
            self.running.append(sequence)
        return admitted

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

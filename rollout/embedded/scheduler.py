"""Who waits and who runs. Order is first come, first served; retracted sequences go first."""

from collections import deque
from collections.abc import Callable, Container

from rollout.embedded.kv_cache import KVCache
from rollout.embedded.sequence import Sequence

FULL_BATCH_SHARE = 16  # rows that must be free before a full batch admits again: 1 of so many


class Scheduler:
    """Waiting queue and running sequences, one a row, each with its part of the cache. The caller bounds the queue."""

    def __init__(self, *, max_running: int, max_prefill_tokens: int, cache: KVCache) -> None:
        self.max_running, self.max_prefill_tokens, self.cache = max_running, max_prefill_tokens, cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        """Append to the queue, in order."""
        self.waiting.extend(sequences)

    def admit(self) -> tuple[list[Sequence], list[Sequence]]:
        """Move the next sequences from waiting to running: (those that only decode, those to prefill), in the order of their rows.

        As many as rows, cache and one prefill batch allow. One with all tokens known but the last needs no prefill. While the rows
        are full and the queue is deep, it waits for several free rows, for a prefill of few costs almost as much as one of many.
        """
        num_free = self.max_running - len(self.running)
        if num_free < min(len(self.waiting), self.max_running // FULL_BATCH_SHARE):
            return [], []
        decoding: list[Sequence] = []
        prefill: dict[object, Sequence] = {}
        equal: list[Sequence] = []
        longest = 0
        while len(decoding) + len(prefill) < num_free:
            equal += self._remove_equal(prefill)
            if not self.waiting:
                break
            sequence = self.waiting[0]
            prefix = self.cache.match(sequence)
            num_new = len(sequence.tokens) - prefix.num_tokens
            fits = num_new == 1 or not prefill or max(longest, num_new) * (len(prefill) + 1) <= self.max_prefill_tokens
            if not (fits and self.cache.can_allocate(sequence, prefix)):
                break
            self.cache.allocate(sequence, prefix)
            longest = max(longest, num_new)
            self.waiting.popleft()
            if num_new == 1 and sequence.limit:
                decoding.append(sequence)
            else:
                prefill[_content(sequence)] = sequence
        self.waiting.extendleft(reversed(equal))
        self.running += [*decoding, *prefill.values()]
        return decoding, list(prefill.values())

    def _remove_equal(self, prefill: Container[object]) -> list[Sequence]:
        """Those at the head of the queue that equal one of this prefill: in the next step its pages are known, and they only decode."""
        equal = []
        while self.waiting and _content(self.waiting[0]) in prefill:
            equal.append(self.waiting.popleft())
        return equal

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


def _content(sequence: Sequence) -> object:
    """The same for sequences where one can go on from the other's pages; one with a scored prompt is computed for itself."""
    return sequence if sequence.is_scored else (sequence.cache_key, *sequence.tokens)

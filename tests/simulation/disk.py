"""The broker's disk: transactions that are kept whole or not at all, the last of which may be torn off; it may be full."""

from collections import deque
from collections.abc import Sequence

from simulation.actor import require

from broker.store import MemoryStore, StoreError, Write

MAX_KEY_BYTES = 511
"""LMDB's."""
KEPT = 16
"""How many of the last transactions can be taken back."""

Undo = list[Write]


class Disk(MemoryStore):
    """A store that outlives its broker."""

    def __init__(self, durability: str) -> None:
        super().__init__()
        self.durability, self.tables = durability, self._tables
        self.is_full = self.is_nearly_full = False
        self._undo: deque[Undo] = deque(maxlen=KEPT)

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change. Raises StoreError, and makes none, while the disk is full."""
        if self.is_full:
            raise StoreError("the simulated disk is full", code="disk_full")
        require(all(0 < len(write.key.encode()) <= MAX_KEY_BYTES for write in writes), "a key that no store takes")
        self._undo.append([Write(write.table, write.key, self.tables[write.table].get(write.key)) for write in writes])
        super().commit(writes)

    def tear_off(self, count: int) -> set[tuple[str, str]]:
        """Lose the last `count` transactions, each as a whole; returns the tables and keys they had changed."""
        lost: set[tuple[str, str]] = set()
        for _ in range(min(count, len(self._undo))):
            undo = self._undo.pop()[::-1]
            lost |= {(write.table, write.key) for write in undo}
            super().commit(undo)
        return lost

    def refusal(self, size_bytes: int) -> str:
        """Why no more should be taken now; empty when there is room."""
        return "the simulated disk is nearly full" if self.is_full or self.is_nearly_full else ""

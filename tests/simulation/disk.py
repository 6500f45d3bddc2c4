"""The broker's disk: transactions that are kept whole or not at all, the last of which may be torn off; it may be full."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from simulation.actor import require

from broker.store.interface import TABLES, StoreError, Write

MAX_KEY_BYTES = 511
"""LMDB's."""
KEPT = 16
"""How many of the last transactions can be taken back."""

Undo = list[tuple[str, str, Any]]


class Disk:
    """A store (broker.store.Store) that outlives its broker. Payloads and partials are kept as the frames they are."""

    def __init__(self, durability: str) -> None:
        self.durability = durability
        self.tables: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
        self.is_full = self.is_nearly_full = False
        self.num_commits = 0
        self._undo: deque[Undo] = deque(maxlen=KEPT)

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change. Raises StoreError, and makes none, while the disk is full."""
        if self.is_full:
            raise StoreError("the simulated disk is full", code="disk_full")
        undo: Undo = []
        require(all(0 < len(write.key.encode()) <= MAX_KEY_BYTES for write in writes), "a key that no store takes")
        for write in writes:
            table = self.tables[write.table]
            undo.append((write.table, write.key, table.get(write.key)))
            if write.value is None:
                table.pop(write.key, None)
            else:
                table[write.key] = write.value
        self._undo.append(undo)
        self.num_commits += 1

    def tear_off(self, count: int) -> set[tuple[str, str]]:
        """Lose the last `count` transactions, each as a whole; returns the tables and keys they had changed."""
        lost: set[tuple[str, str]] = set()
        for _ in range(min(count, len(self._undo))):
            for table, key, value in reversed(self._undo.pop()):
                lost.add((table, key))
                if value is None:
                    self.tables[table].pop(key, None)
                else:
                    self.tables[table][key] = value
        return lost

    def wipe(self) -> None:
        """Lose everything: another machine with an empty folder."""
        self.tables = {name: {} for name in TABLES}
        self._undo.clear()

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""
        value: bytes | None = self.tables[table].get(key)
        return value

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record, or None."""
        value: Sequence[Any] | None = self.tables[table].get(key)
        return value

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""
        yield from sorted(self.tables[table].items())

    def refusal(self, size_bytes: int) -> str:
        """Why no more should be taken now; empty when there is room."""
        return "the simulated disk is nearly full" if self.is_full or self.is_nearly_full else ""

    def report(self) -> dict[str, Any]:
        """For the status."""
        return {"durability": self.durability}

    def size_bytes(self) -> int:
        """The number of records; their sizes matter to nobody here."""
        return sum(map(len, self.tables.values()))

    def close(self) -> None:
        """Nothing to release."""

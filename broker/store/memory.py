"""A store that forgets when the process ends."""

from collections.abc import Iterator, Sequence
from typing import Any

from broker.store.interface import TABLES, Write
from broker.store.records import packed


class MemoryStore:
    """The twin of the LMDB store in dictionaries."""

    durability = "memory"

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, bytes]] = {name: {} for name in TABLES}

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change."""
        for write in writes:
            if write.value is None:
                self._tables[write.table].pop(write.key, None)
            else:
                self._tables[write.table][write.key] = packed(write.value)

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""
        return self._tables[table].get(key)

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""
        yield from sorted(self._tables[table].items())

    def refusal(self, size_bytes: int) -> str:
        """Nothing is ever refused."""
        return ""

    def report(self) -> dict[str, Any]:
        """For the status."""
        return {"durability": self.durability, "size_bytes": self.size_bytes()}

    def size_bytes(self) -> int:
        """The sum of the values' sizes."""
        return sum(len(value) for table in self._tables.values() for value in table.values())

    def close(self) -> None:
        """Nothing to release."""

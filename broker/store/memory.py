"""A store that forgets when the process ends."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from broker.state.effects import Write
from broker.store.interface import TABLES
from broker.store.records import packed, packed_size, unpack_frames
from slimebus.bus.errors import UsageError


class MemoryStore:
    """The twin of the LMDB store in dictionaries."""

    durability, where, hints = "memory", "memory", ""

    def __init__(self) -> None:
        self._tables: dict[str, dict[str, bytes | Sequence[Any]]] = {name: {} for name in TABLES}

    def announce(self, endpoint: str, hints: str) -> None:
        """No command and no later broker can find what is only here."""

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change. Frames are kept as they are, not copied."""
        for write in writes:
            if write.value is None:
                self._tables[write.table].pop(write.key, None)
            else:
                self._tables[write.table][write.key] = write.value

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""
        found = self._tables[table].get(key)
        return None if found is None else packed(found)

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None."""
        found = self._tables[table].get(key)
        return None if found is None else unpack_frames(found, table, key) if isinstance(found, bytes) else found

    def keys(self, table: str) -> Iterator[str]:
        """The keys of a table, in order."""
        yield from sorted(self._tables[table])

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""
        yield from ((key, packed(value)) for key, value in sorted(self._tables[table].items()))

    def refusal(self, size_bytes: int) -> str:
        """Nothing is ever refused."""
        return ""

    def report(self) -> dict[str, Any]:
        """For the status."""
        return {"durability": self.durability, "size_bytes": self.size_bytes()}

    def size_bytes(self) -> int:
        """The sum of the values' sizes."""
        return sum(packed_size(value) for table in self._tables.values() for value in table.values())

    def close(self) -> None:
        """Nothing to release."""


def read_nothing(folder: Path, out: Path | None = None, *, is_checked: bool = True) -> NoReturn:
    """Raise UsageError: what a broker keeps in memory no other process can read."""
    raise UsageError(f"no store under {folder}: broker.durability is memory; with `os` or `fsync` the store can be read")

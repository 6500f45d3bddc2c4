"""The store: a few tables of opaque records, changed by one atomic commit at a time."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, get_args

from broker.state.effects import Table, Write
from slimebus.bus.errors import SlimebusError

TABLES: tuple[str, ...] = get_args(Table)


class StoreError(SlimebusError):
    """The store cannot be written now: `disk_full` when room would mend it, else `store`. The same commit may succeed later."""

    code = "store"
    retryable = True


class StoreRefusal(SlimebusError):
    """The store will never take one of these writes; the others it would."""

    code = "unstorable"


class Damaged(SlimebusError):
    """A record is not what was written: its checksum does not fit, or it cannot be read."""

    code = "damaged"
    retryable = True

    def __init__(self, table: str, key: str, text: str, *, code: str = "damaged") -> None:
        super().__init__(text, code=code)
        self.table, self.key = table, key


class Store(Protocol):
    """A place to keep records. `durability` is the word of the config that it keeps."""

    durability: str

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change or none; once it returns they survive what the store's durability promises.

        Raises StoreError, after which nothing of it is kept and the same commit may be tried again; StoreRefusal for one that may not.
        """

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None. Raises Damaged."""

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None. Raises Damaged."""

    def scan(self, table: str) -> Iterator[tuple[str, bytes | Damaged]]:
        """Every record of a table, by key; Damaged in place of one that is. Raises Damaged where the table cannot be read."""

    def refusal(self, size_bytes: int) -> str:
        """Why so many bytes more should not be taken now; empty when there is room and a reserve is left for what frees room."""

    def report(self) -> dict[str, Any]:
        """For the status: durability, path, size_bytes, free_bytes."""

    def close(self) -> None:
        """Release it."""

"""The store: a few tables of opaque records, changed by one atomic commit at a time."""

import signal
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, get_args

from broker.state.effects import Table, Write
from slimebus.bus.errors import SlimebusError, UsageError

TABLES: tuple[str, ...] = get_args(Table)
WAY_OUT = (
    "start over in a new run directory; `slimebus buffer verify` lists what is damaged, `slimebus buffer export` saves what is whole, "
    "`slimebus buffer import` takes it in there"
)


class StoreError(SlimebusError):
    """The store cannot be written now: `disk_full` when room would mend it, else `store`. The same commit may succeed later."""

    code = "store"
    retryable = True


class Damaged(SlimebusError):
    """A record is not what was written: its checksum does not fit, or it cannot be read."""

    code = "damaged"
    retryable = True

    def __init__(self, table: str, key: str, text: str, *, code: str = "damaged") -> None:
        super().__init__(text, code=code)
        self.table, self.key = table, key


class Records(Protocol):
    """Records to read. Of a snapshot they are those of one moment, also while a broker writes. `where`: for messages."""

    where: str

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None. Raises Damaged."""

    def keys(self, table: str) -> Iterator[str]:
        """The keys of a table, in order; no record is read. Raises Damaged where the table cannot be read."""

    def scan(self, table: str) -> Iterator[tuple[str, bytes | Damaged]]:
        """Every record of a table, by key; Damaged in place of one that is. Raises Damaged where the table cannot be read."""


class Store(Records, Protocol):
    """A place to keep records, held by one broker. `durability` is the word of the config that it keeps.

    hints: where the broker before this one published hints; empty when there was none.
    """

    durability: str
    hints: str

    def announce(self, endpoint: str, hints: str) -> None:
        """Leave word of who serves this store: for commands on this machine, and the hints' address for the next broker."""

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change or none; once it returns they survive what the store's durability promises.

        Raises StoreError, after which nothing of it is kept and the same commit may be tried again. Keys have 1 to 511 bytes: what clients
        name is bounded when it is read (slimebus/bus/envelope.py:check_name).
        """

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None. Raises Damaged."""

    def refusal(self, size_bytes: int) -> str:
        """Why so many bytes more should not be taken now; empty when there is room and enough is left for what frees room."""

    def report(self) -> dict[str, Any]:
        """For the status: durability, path, size_bytes, free_bytes."""

    def close(self) -> None:
        """Release it."""


def damaged_store(which: str, why: object) -> UsageError:
    """The error for a store that is not what was written, with the way out."""
    return UsageError(f"the broker's store {which} is damaged: {why}; {WAY_OUT}", code="store_damaged")


def ended_by(returncode: int) -> str:
    """What a signal says that ended a process which read a store; empty for an exit code."""
    if returncode >= 0:
        return ""
    return f"reading it ended with {signal.Signals(-returncode).name}: a file was cut short, or its pages are damaged"

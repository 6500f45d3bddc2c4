"""Where the broker's state is kept: LMDB on disk, or memory for tests and throw-away runs.

A further kind of store is a file here, which keeps to Store and Records, and its row in `KINDS`.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from broker.state.effects import Write
from broker.store import lmdb_store, memory
from broker.store.interface import Damaged, Records, Store, StoreError
from broker.store.lmdb_store import LmdbStore
from broker.store.memory import MemoryStore


class Kind(NamedTuple):
    """How a broker opens its store in a folder, and how others read it or copy it to a new folder, also beside a working broker.

    read: raises UsageError for a folder without a store, or a damaged one. With is_checked=False damage is not looked for before: it may
    end the process. copy: raises it too, and returns the bytes of the copy.
    """

    open: Callable[[Path], Store]
    read: Callable[..., AbstractContextManager[Records]]
    copy: Callable[[Path, Path], int]


KINDS = {
    "fsync": Kind(functools.partial(LmdbStore, is_synced=True), lmdb_store.read_folder, lmdb_store.copy_folder),
    "os": Kind(functools.partial(LmdbStore, is_synced=False), lmdb_store.read_folder, lmdb_store.copy_folder),
    "memory": Kind(lambda folder: MemoryStore(), memory.read_nothing, memory.read_nothing),
}
"""By `broker.durability`. fsync: survives power loss. os: survives a killed broker, not a killed machine. memory: survives nothing."""


def open_store(durability: str, folder: Path) -> Store:
    """The store of a run, for its broker. Raises UsageError where it cannot be used."""
    return KINDS[durability].open(folder)


__all__ = ["KINDS", "Damaged", "LmdbStore", "MemoryStore", "Records", "Store", "StoreError", "Write", "open_store"]

"""Where the broker's state is kept: LMDB on disk, or memory for tests and throw-away runs."""

from pathlib import Path
from typing import Literal

from broker.state.effects import Write
from broker.store.interface import Damaged, Store, StoreError, StoreRefusal
from broker.store.lmdb_store import LmdbStore
from broker.store.memory import MemoryStore


def open_store(durability: Literal["fsync", "os", "memory"], path: Path) -> Store:
    """fsync: survives power loss. os: survives a killed broker, not a killed machine. memory: survives nothing."""
    if durability == "memory":
        return MemoryStore()
    return LmdbStore(path, is_synced=durability == "fsync")


__all__ = ["Damaged", "LmdbStore", "MemoryStore", "Store", "StoreError", "StoreRefusal", "Write", "open_store"]

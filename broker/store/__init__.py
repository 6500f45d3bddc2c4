"""Where the broker's state is kept: LMDB on disk, or memory for tests and throw-away runs."""

from pathlib import Path
from typing import Literal

from broker.store.interface import TABLES, Damaged, Store, StoreError, Write
from broker.store.lmdb_store import FORMAT, LmdbStore
from broker.store.memory import MemoryStore
from broker.store.records import pack_frames, unpack_frames

Durability = Literal["fsync", "os", "memory"]


def open_store(durability: Durability, path: Path) -> Store:
    """fsync: survives power loss. os: survives a killed broker, not a killed machine. memory: survives nothing."""
    if durability == "memory":
        return MemoryStore()
    return LmdbStore(path, is_synced=durability == "fsync")


__all__ = [
    "FORMAT",
    "TABLES",
    "Damaged",
    "Durability",
    "LmdbStore",
    "MemoryStore",
    "Store",
    "StoreError",
    "Write",
    "open_store",
    "pack_frames",
    "unpack_frames",
]

"""The store in an LMDB environment: one transaction a commit, the map grows by itself.

The environment is the state. Payloads and prompts have tables of their own, so that reading the state back touches none of them.
"""

import fcntl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from broker.store.interface import FORMAT, TABLES, Write, pack_into, packed_size, unpack_frames
from slimebus.errors import SlimebusError, UsageError

FIRST_MAP_BYTES = 256 * 1024 * 1024
SCRATCH_BYTES = 4 * 1024 * 1024
PAGE_SLACK_BYTES = 8192
"""What a record may take beyond its own size: it is rounded to pages, and its path in the tree is copied."""


class LmdbStore:
    """Records in the folder `path`. `is_synced`: each commit waits for the disk."""

    def __init__(self, path: Path, *, is_synced: bool, map_bytes: int = FIRST_MAP_BYTES) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._lock = _lock(path)
        try:
            self._env = _open(path, is_synced, map_bytes)
        except UsageError:
            self._lock.close()
            raise
        self._tables = {name: self._env.open_db(name.encode()) for name in TABLES}
        try:
            self._check_format()
        except UsageError:
            self.close()
            raise

    def _check_format(self) -> None:
        with self._env.begin(write=True) as txn:
            found = txn.get(b"slimebus format")
            if found is None:
                txn.put(b"slimebus format", str(FORMAT).encode())
            elif found != str(FORMAT).encode():
                raise UsageError(
                    f"the store at {self.path} has format {bytes(found).decode(errors='replace')}, this release reads {FORMAT}; "
                    "use the release that wrote it, or start in a new run directory",
                    code="store_format",
                )

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change in one transaction. Raises SlimebusError `store`, after which nothing of it is kept."""
        while True:
            try:
                self._write(writes)
                return
            except lmdb.MapFullError:
                self._grow(sum(packed_size(write.value) + PAGE_SLACK_BYTES for write in writes if write.value is not None))
            except lmdb.Error as bad:
                raise SlimebusError(f"the broker's store at {self.path} cannot be written: {bad}", code="store", retryable=True) from None

    def _write(self, writes: Sequence[Write]) -> None:
        with self._env.begin(write=True) as txn:
            for write in writes:
                key, value, table = write.key.encode(), write.value, self._tables[write.table]
                if value is None:
                    txn.delete(key, db=table)
                else:
                    txn.put(key, value if isinstance(value, bytes) else self._packed(value), db=table)

    def _packed(self, frames: Sequence[Any]) -> memoryview:
        """One value from several frames, in memory that the next value takes again: fresh memory costs more than the copy."""
        size = packed_size(frames)
        return pack_into(self._scratch if size <= len(self._scratch) else memoryview(bytearray(size)), frames)

    def _grow(self, needed_bytes: int) -> None:
        size = self._env.info()["map_size"]
        self._env.set_mapsize(max(2 * size, size + 2 * needed_bytes) if size < 1 << 33 else size + max(1 << 33, 2 * needed_bytes))

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""
        with self._env.begin() as txn:
            found = txn.get(key.encode(), db=self._tables[table])
            return None if found is None else bytes(found)

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None."""
        found = self.get(table, key)
        return None if found is None else unpack_frames(found)

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""
        with self._env.begin() as txn:
            for key, value in txn.cursor(db=self._tables[table]):
                yield bytes(key).decode(), bytes(value)

    def size_bytes(self) -> int:
        """Pages in use."""
        pages = self._env.info()["last_pgno"] + 1
        return int(pages * self._env.stat()["psize"])

    def close(self) -> None:
        """Write what the system may still hold back, and release the folder."""
        self._env.sync(True)
        self._env.close()
        self._lock.close()


def _open(path: Path, is_synced: bool, map_bytes: int) -> Any:
    try:
        return lmdb.open(
            str(path), map_size=map_bytes, max_dbs=len(TABLES) + 1, sync=is_synced, metasync=is_synced, max_readers=64, subdir=True
        )
    except lmdb.Error as bad:
        raise UsageError(f"cannot open the broker's store at {path}: {bad}", code="store") from None


def _lock(path: Path) -> Any:
    """Hold the folder for this process. Raises UsageError when another broker has it."""
    lock = open(path / "owner.lock", "w")  # noqa: SIM115 - held for the life of the store
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise UsageError(f"another broker has the store at {path} open; stop it or use another run directory", code="store_busy") from None
    return lock

"""The store in an LMDB environment: one transaction a commit, the map grows by itself.

The environment is the state. Payloads and prompts have tables of their own, so that reading the state back touches none of them.

    | meta | meta | used ... free ... used |  hole: takes no room on the disk  |
                                           `-- last page ever used             `-- end of the map, and of the file data.mdb

The file is as long as its map, so one that is shorter was cut short.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import lmdb

from broker.state.effects import RowTable, Write
from broker.store.interface import TABLES, Damaged, Records, StoreError, damaged_store, ended_by
from broker.store.records import CHECKSUM_BYTES, packed_size, seal, seal_frames, unpack_frames, unseal
from slimebus.bus.errors import UsageError
from slimebus.telemetry.formatting import format_size as readable_size

log = logging.getLogger("slimebus.broker")

FORMAT = 3
"""The layout of the store. Another number is refused with the way out."""
FORMAT_KEY = b"slimebus format"
FIRST_MAP_BYTES = 256 * 1024 * 1024
READERS_BYTES = 16 * 1024
SCRATCH_BYTES = 4 * 1024 * 1024
LEFT_FREE_BYTES, SMALL_DISK = 64 * 1024 * 1024, 16
"""New samples leave so much of the disk free, for the commits that free room; of a small file system a 16th."""
LOCK_TRIES, LOCK_RETRY_S = 20, 0.01
"""Commands that look whether a broker works here hold its lock for some microseconds."""
PAGE_SLACK_BYTES = 8192
"""What a record may take beyond its own size: it is rounded to pages, and its path in the tree is copied."""


class LmdbRecords:
    """The records of one transaction with buffers. A store of an earlier time may have fewer tables."""

    def __init__(self, where: str, txn: Any, tables: dict[str, Any]) -> None:
        self.where, self._txn, self._tables = where, txn, tables

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None. Raises Damaged; lmdb.Error where that may pass."""
        if table not in self._tables:
            return None
        try:
            found = self._txn.get(key.encode(), db=self._tables[table])
        except (lmdb.CorruptedError, lmdb.PageNotFoundError) as bad:
            raise Damaged(table, key, f"record {key!r} of table {table!r} cannot be read: {bad}") from None
        return None if found is None else unseal(table, key, found)

    def keys(self, table: str) -> Iterator[str]:
        """The keys of a table, in order; no record is read. Raises Damaged where the table cannot be read."""
        yield from (key for key, _ in self._items(table, values=False))

    def scan(self, table: str) -> Iterator[tuple[str, bytes | Damaged]]:
        """Every record of a table, by key; Damaged in place of one that is. Raises Damaged where the table cannot be read."""
        for key, value in self._items(table, values=True):
            try:
                record: bytes | Damaged = unseal(table, key, value)
            except Damaged as bad:
                record = bad
            yield key, record

    def _items(self, table: str, *, values: bool) -> Iterator[tuple[str, Any]]:
        if table not in self._tables:
            return
        try:
            for item in self._txn.cursor(db=self._tables[table]).iternext(values=values):
                key, value = item if values else (item, None)
                yield bytes(key).decode(errors="replace"), value
        except lmdb.Error as bad:
            raise Damaged(table, "", f"table {table!r} cannot be read: {bad}") from None


class LmdbStore:
    """Records in the folder `path`. `is_synced`: each commit waits for the disk.

    Raises UsageError for a folder that cannot be used: held by another broker, of another format, read-only, damaged.
    """

    def __init__(self, path: Path, *, is_synced: bool, map_bytes: int = FIRST_MAP_BYTES) -> None:
        self.path, self.where, self.durability = path, str(path), "fsync" if is_synced else "os"
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._map_bytes, self._is_open = map_bytes, False
        self._lock = _lock(path)
        before = _announced(self._lock)
        self.hints = str(before.get("hints", ""))
        try:
            if _has_file(path):
                check_readable(path)
            elif before:
                raise damaged_store(f"at {path}", "data.mdb is missing or empty, though a broker has kept its state here")
            self._open()
        except UsageError:
            if self._is_open:
                self._env.close()
            self._lock.close()
            raise
        disk = os.statvfs(path)
        self._left_free_bytes = min(LEFT_FREE_BYTES, disk.f_blocks * disk.f_frsize // SMALL_DISK)

    def _open(self) -> None:
        try:
            self._env = open_environment(self.path, map_bytes=self._map_bytes, is_synced=self.durability == "fsync")
            self._make_as_long_as(self._env.info()["map_size"])
            self._tables = {name: self._env.open_db(name.encode()) for name in TABLES}
            with self._env.begin(write=True) as txn:
                found = txn.get(FORMAT_KEY)
                if found is None:
                    txn.put(FORMAT_KEY, str(FORMAT).encode())
        except (lmdb.Error, OSError) as bad:
            raise cannot_open(self.path, bad) from None
        self._is_open = True
        check_format(self.path, found)

    def _make_as_long_as(self, map_bytes: int) -> None:
        file = self.path / "data.mdb"
        if file.stat().st_size < map_bytes:
            os.truncate(file, map_bytes)

    def announce(self, endpoint: str, hints: str) -> None:
        """Leave word of who serves this store: for commands on this machine, and the hints' address for the next broker."""
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(json.dumps({"pid": os.getpid(), "endpoint": endpoint, "hints": hints}))
        self._lock.flush()

    # --- writing ---

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change in one transaction. Raises StoreError, after which nothing of it is kept."""
        if not self._is_open:
            self._reopen()
        retries = 2
        while True:
            try:
                self._write(writes)
                return
            except lmdb.MapFullError:
                self._grow(_needed(writes))
            except lmdb.Error as bad:  # a full disk may show as a short write first, and by its name the second time
                retries -= 1
                if not retries or isinstance(bad, lmdb.CorruptedError):
                    raise self._trouble(bad, _needed(writes)) from None
                if isinstance(bad, lmdb.PanicError):
                    self._reopen()

    def _write(self, writes: Sequence[Write]) -> None:
        with self._env.begin(write=True) as txn:
            for write in writes:
                self._write_one(txn, write)

    def _write_one(self, txn: Any, write: Write) -> None:
        key, value, table = write.key.encode(), write.value, self._tables[write.table]
        if value is None:
            txn.delete(key, db=table)
        elif isinstance(value, bytes):
            txn.put(key, seal(write.table, write.key, value), db=table)
        else:
            txn.put(key, seal_frames(write.table, write.key, value, self._buffer(value)), db=table)

    def _buffer(self, frames: Sequence[Any]) -> memoryview:
        """Memory for the sealed frames, that the next value takes again: fresh memory costs more than the copy."""
        size = CHECKSUM_BYTES + packed_size(frames)
        return self._scratch if size <= len(self._scratch) else memoryview(bytearray(size))

    def _grow(self, needed_bytes: int) -> None:
        size = self._env.info()["map_size"]
        wanted = max(2 * size, size + 2 * needed_bytes) if size < 1 << 33 else size + max(1 << 33, 2 * needed_bytes)
        try:
            self._make_as_long_as(wanted)
            self._env.set_mapsize(wanted)
        except (lmdb.Error, OSError, OverflowError) as bad:
            self._map_bytes = size
            self._reopen()  # LMDB has let go of the old map and would follow a null pointer
            text = f"the map of the broker's store at {self.path} cannot grow from {readable_size(size)} to {readable_size(wanted)}: {bad}"
            raise StoreError(f"{text}; raise the limit of address space (ulimit -v)") from None

    def _reopen(self) -> None:
        """Open the environment anew: after a meta page that could not be written, LMDB refuses everything until then."""
        self._is_open = False
        self._env.close()
        try:
            self._open()
        except UsageError as bad:
            raise StoreError(bad.text) from None

    def _trouble(self, bad: lmdb.Error, needed_bytes: int) -> StoreError:
        if _is_full(bad) or free_bytes(self.path) < needed_bytes + PAGE_SLACK_BYTES:
            return StoreError(self._full_text(needed_bytes), code="disk_full")
        if isinstance(bad, lmdb.CorruptedError):
            return StoreError(damaged_store(f"at {self.path}", bad).text)
        remedy = "look at the disk (dmesg), or stop the broker and move its folder to another disk"
        text = f"the broker's store at {self.path} cannot be written: {bad}; nothing of it was acknowledged, and it is tried again"
        return StoreError(f"{text}; {remedy}")

    def _full_text(self, needed_bytes: int) -> str:
        free, needed = readable_size(free_bytes(self.path)), readable_size(needed_bytes)
        readers = "".join(f"; process {pid} reads the store and holds back what is freed until it ends" for pid in self._readers())
        remedy = "make room there (or raise the quota) and the run goes on by itself; nothing acknowledged is lost"
        return f"the disk of the broker's store is full: {self.path} has {free} free and {needed} are needed; {remedy}{readers}"

    # --- room ---

    def refusal(self, size_bytes: int) -> str:
        """Why so many bytes more should not be taken now; empty while they leave enough free. Free pages of the file are room, too."""
        if self._is_open and (count := self._env.reader_check()):
            log.info("%d readers of the store at %s ended without closing it; what they held back is free", count, self.path)
        needed = max(self._left_free_bytes, 2 * size_bytes)
        has_room = free_bytes(self.path) >= needed or (not self._readers() and free_bytes(self.path) + self._spare_bytes() >= needed)
        return "" if has_room else self._full_text(needed)

    def _readers(self) -> list[str]:
        """Ids of the processes that read now: pages that are freed meanwhile cannot be written to before they end."""
        rows = [line.split() for line in self._env.readers().splitlines()[1:]] if self._is_open else []
        return sorted({row[0] for row in rows if len(row) == 3 and row[2] != "-"})

    def _spare_bytes(self) -> int:
        """Pages of the file that hold nothing."""
        if not self._is_open:
            return 0
        with self._env.begin() as txn:
            stats = [txn.stat(table) for table in self._tables.values()] + [self._env.stat()]
        used: int = sum(s["branch_pages"] + s["leaf_pages"] + s["overflow_pages"] for s in stats)
        return max(0, self.size_bytes() - used * int(stats[0]["psize"]))

    def report(self) -> dict[str, Any]:
        """For the status: durability, path, size and room in bytes."""
        return {
            "durability": self.durability,
            "path": str(self.path),
            "size_bytes": self.size_bytes(),
            "used_bytes": self.size_bytes() - self._spare_bytes(),
            "free_bytes": free_bytes(self.path),
        }

    # --- reading ---

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None. Raises Damaged."""
        try:
            with self._records() as records:
                return records.get(table, key)
        except lmdb.Error as bad:
            raise StoreError(f"the broker's store at {self.path} cannot be read now: {bad}") from None

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None. Raises Damaged."""
        found = self.get(table, key)
        return None if found is None else unpack_frames(found, table, key)

    def keys(self, table: str) -> Iterator[str]:
        """The keys of a table, in order. Raises Damaged where the table cannot be read."""
        with self._records() as records:
            yield from records.keys(table)

    def scan(self, table: str) -> Iterator[tuple[str, bytes | Damaged]]:
        """Every record of a table, by key; Damaged in place of one that is. Raises Damaged where the table cannot be read."""
        with self._records() as records:
            yield from records.scan(table)

    @contextlib.contextmanager
    def _records(self) -> Iterator[LmdbRecords]:
        with self._env.begin(buffers=True) as txn:
            yield LmdbRecords(self.where, txn, self._tables)

    def size_bytes(self) -> int:
        """The size of the file, in pages that were ever used."""
        if not self._is_open:
            return (self.path / "data.mdb").stat().st_size
        pages = self._env.info()["last_pgno"] + 1
        return int(pages * self._env.stat()["psize"])

    def close(self) -> None:
        """Write what the system may still hold back, and release the folder."""
        try:
            if self._is_open:
                self._env.sync(True)
        except lmdb.Error as bad:
            log.error("the store at %s: the last changes may not be on disk: %s", self.path, bad)
        self._env.close()
        self._lock.close()


@contextlib.contextmanager
def read_folder(folder: Path, *, is_checked: bool = True) -> Iterator[Records]:
    """The records of a store as they are now, also beside a working broker. Raises UsageError when there is none, or it is damaged.

    is_checked: a child process looks at its pages first, so that damage does not end this process.
    """
    with _reader(folder, is_checked=is_checked) as env, begin_read(env) as txn:
        yield LmdbRecords(str(folder), txn, {name: handle for name in TABLES if (handle := _table(env, txn, name)) is not None})


def copy_folder(folder: Path, out: Path) -> int:
    """Copy a store as it is at one moment, also beside a working broker, to a new folder; its bytes. Raises as `read_folder`."""
    with _reader(folder) as env, contextlib.ExitStack() as stack:
        try:
            out.mkdir(parents=True)
            stack.callback(shutil.rmtree, out, ignore_errors=True)
            env.copy(str(out), compact=True)
            file, map_bytes = out / "data.mdb", env.info()["map_size"]
            size_bytes = file.stat().st_size
            with file.open("r+b") as copied:
                copied.truncate(map_bytes)
                os.fsync(copied.fileno())
            stack.pop_all()
        except (lmdb.Error, OSError) as bad:
            raise UsageError(f"the store at {folder} cannot be copied to {out}: {bad}") from None
    return size_bytes


@contextlib.contextmanager
def _reader(folder: Path, *, is_checked: bool = True) -> Iterator[Any]:
    """The environment of a store, for reading. Raises as `read_folder`."""
    if not _has_file(folder):
        why = "it does not exist" if not folder.parent.exists() else "the run has not begun, or its durability is memory"
        raise UsageError(f"no store under {folder}: {why}; give the RUN.yaml or the --run-dir of a run that was started")
    if is_checked:
        check_readable(folder)
    try:
        env = open_environment(folder, is_readonly=True)
    except lmdb.Error as bad:
        raise cannot_open(folder, bad) from None
    try:
        with begin_read(env) as txn:
            check_format(folder, txn.get(FORMAT_KEY))
        yield env
    except (lmdb.CorruptedError, lmdb.PageNotFoundError) as bad:
        raise cannot_open(folder, bad) from None
    finally:
        env.close()


def begin_read(env: Any) -> Any:
    """A read transaction, of a map that a working broker may have grown meanwhile."""
    try:
        return env.begin(buffers=True)
    except lmdb.MapResizedError:
        env.set_mapsize(0)  # 0: take the size that the file has now
        return env.begin(buffers=True)


def _table(env: Any, txn: Any, name: str) -> Any:
    try:
        return env.open_db(name.encode(), txn=txn, create=False)
    except lmdb.NotFoundError:
        return None


def free_bytes(folder: Path) -> int:
    """What this user may still write on the file system of `folder`."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def open_environment(path: Path, *, map_bytes: int = 0, is_synced: bool = True, is_readonly: bool = False) -> Any:
    """The LMDB environment of a store. Raises lmdb.Error."""
    use = {"readonly": is_readonly, "create": not is_readonly, "sync": is_synced, "metasync": is_synced}
    return lmdb.open(str(path), map_size=map_bytes, max_dbs=len(TABLES) + 1, max_readers=64, **use)


def _has_file(folder: Path) -> bool:
    file = folder / "data.mdb"
    return file.is_file() and file.stat().st_size > 0


def check_readable(folder: Path) -> None:
    """Raise UsageError when LMDB cannot walk the tables of rows, or the file was cut short.

    A child process tries: damaged pages may end the process that reads them.
    """
    command = [sys.executable, "-P", str(Path(__file__).with_name("read_probe.py")), str(folder), *get_args(RowTable)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise damaged_store(f"at {folder}", ended_by(done.returncode) or done.stdout.strip() or done.stderr.strip()[-300:])


def check_format(path: Path, found: Any) -> None:
    """Raise UsageError unless the store was written in this layout."""
    if found is not None and bytes(found) != str(FORMAT).encode():
        text = f"the store at {path} has format {bytes(found).decode(errors='replace')}, this release reads {FORMAT}"
        remedy = "(its `slimebus buffer export` writes what this one's `slimebus buffer import` reads), or start in a new run directory"
        raise UsageError(f"{text}; use the release that wrote it {remedy}", code="store_format")


def cannot_open(path: Path, why: Exception) -> UsageError:
    """Why a store cannot be opened, and the way out."""
    if isinstance(why, lmdb.InvalidError | lmdb.CorruptedError | lmdb.VersionMismatchError | lmdb.PageNotFoundError):
        return damaged_store(f"at {path}", why)
    text = f"cannot open the broker's store at {path}: {why}"
    if isinstance(why, lmdb.ReadonlyError) or getattr(why, "errno", 0) in (errno.EROFS, errno.EACCES, errno.EPERM):
        text = f"the broker's store at {path} cannot be written: {why}; give this user write access to it, or use another run directory"
    elif _is_full(why):
        text = f"the broker's store at {path} cannot be opened: its disk is full ({readable_size(free_bytes(path))} free); make room there"
    return UsageError(text, code="store")


def _is_full(bad: Exception) -> bool:
    return isinstance(bad, lmdb.DiskError) or os.strerror(errno.EDQUOT) in str(bad) or os.strerror(errno.ENOSPC) in str(bad)


def _needed(writes: Sequence[Write]) -> int:
    return sum(PAGE_SLACK_BYTES + (0 if write.value is None else packed_size(write.value)) for write in writes)


def _announced(lock: Any) -> dict[str, Any]:
    """What the broker that holds this lock file, or did so last, says of itself; nothing where that cannot be read."""
    lock.seek(0)
    try:
        found = json.loads(lock.read() or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _lock(path: Path) -> Any:
    """Hold the folder for this process. Raises UsageError when another broker has it, or it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with open(path / "lock.mdb", "ab") as readers:  # LMDB maps it unasked for blocks: on a full disk that ends the process
            os.posix_fallocate(readers.fileno(), 0, READERS_BYTES)
        lock = open(path / "owner.lock", "a+")  # noqa: SIM115 - held for the life of the store
    except FileExistsError:
        raise UsageError(f"the broker's store needs a folder, but {path} is a file; move it, or use another run directory") from None
    except OSError as bad:
        raise cannot_open(path, bad) from None
    for _ in range(LOCK_TRIES):
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        time.sleep(LOCK_RETRY_S)
    lock.close()
    raise UsageError(f"another broker has the store at {path} open; stop it or use another run directory", code="store_busy")

"""A store read from another process: one consistent moment of it, without a lock and without loading payloads."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import lmdb
import msgspec

from broker.state.consumers import payload_of
from broker.state.groups import DEAD, DROPPED, Group, Phase, field_key
from broker.state.records import Meta
from broker.store import lmdb_store
from broker.store.interface import TABLES, Damaged
from broker.store.records import unpack_frames
from broker.store.reply_frames import assembled
from slimebus.bus.errors import UsageError
from slimebus.bus.sample_table import CheckedGroup, check_group

STATES: tuple[Phase, ...] = get_args(Phase)
NEAREST_OF = 20_000
"""Ids that are compared with one that is unknown."""


class StoreSnapshot:
    """The records of one transaction. Raises Damaged for a record that is not what was written."""

    def __init__(self, path: Path, txn: Any, tables: dict[str, Any]) -> None:
        self.path, self._txn, self._tables = path, txn, tables

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""
        return lmdb_store.read_record(self._txn, table, self._tables[table], key) if table in self._tables else None

    def keys(self, table: str) -> Iterator[str]:
        """The keys of a table; no record is read."""
        if table not in self._tables:
            return
        try:
            yield from (bytes(key).decode(errors="replace") for key in self._txn.cursor(db=self._tables[table]).iternext(values=False))
        except lmdb.Error as bad:
            raise Damaged(table, "", f"table {table!r} cannot be read: {bad}") from None

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""
        for key, value in lmdb_store.scan_records(self._txn, table, self._tables[table]) if table in self._tables else ():
            if isinstance(value, Damaged):
                raise value
            yield key, value

    def groups(self, states: Iterable[str] = ()) -> Iterator[Group]:
        """Groups in play, then ended ones; of these states, or of all."""
        wanted = set(states) or set(STATES)
        tables = [t for t in ("groups", "ended") if wanted & ({DROPPED, DEAD} if t == "ended" else set(STATES) - {DROPPED, DEAD})]
        for table in tables:
            for _, value in self.scan(table):
                group = msgspec.msgpack.decode(value, type=Group)
                if group.phase in wanted:
                    yield group

    def group(self, name: str) -> Group:
        """One group. Raises UsageError naming the nearest ids."""
        found = (self.get("groups", name) or self.get("ended", name)) if name else None  # no key of the store is empty
        if found is not None:
            return msgspec.msgpack.decode(found, type=Group)
        known = [key for table in ("groups", "ended") for key, _ in zip(self.keys(table), range(NEAREST_OF), strict=False)]
        near = difflib.get_close_matches(name, known, 3, 0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it holds {len(known)} groups; `slimebus buffer ls` lists them"
        raise UsageError(f"no group {name!r} in the store at {self.path}; {hint}")

    def prompt(self, name: str) -> dict[str, Any] | None:
        """The prompt record of a group: prompt, label, metadata; None where none is kept."""
        found = self.get("prompts", name)
        return None if found is None else msgspec.msgpack.decode(found, type=dict[str, Any])

    def samples(self, group: Group) -> CheckedGroup | None:
        """The stored samples of a group, late fields and all; None where it has none. Raises ProtocolError for what nobody can read."""
        found = self.get("payloads", group.id)
        if found is None:
            return None
        frames, late = unpack_frames(found, "payloads", group.id), []
        for field in payload_of(group).late:
            key = field_key(group.id, field.name)
            late.append((field, unpack_frames(self.get("fields", key) or b"", "fields", key)[0]))
        return check_group(assembled(frames, late, None) if late else frames)

    def num_freed_steps(self) -> int:
        """How many steps have no samples any more: every checkpoint that is kept is of a later one."""
        found = self.get("meta", "meta")
        return 0 if found is None else msgspec.msgpack.decode(found, type=Meta).floor


def store_folder(run_dir: Path) -> Path:
    """The folder of the store of a run directory. Raises UsageError when there is none."""
    for folder in (run_dir / "broker", run_dir):
        if (folder / "data.mdb").is_file():
            return folder
    why = "it does not exist" if not run_dir.exists() else "the run has not begun, or its durability is memory"
    raise UsageError(f"no store under {run_dir}/broker: {why}; give the RUN.yaml or the --run-dir of a run that was started")


@contextlib.contextmanager
def open_snapshot(run_dir: Path, *, is_checked: bool = True) -> Iterator[StoreSnapshot]:
    """The store of a run as it is now, also beside a working broker. Raises UsageError when there is none, or it is damaged.

    is_checked: a child process looks at its pages first, so that damage does not end this process.
    """
    folder = store_folder(run_dir)
    if is_checked:
        lmdb_store.check_readable(folder, "read")
    try:
        env = lmdb_store.open_environment(folder, is_readonly=True)
    except lmdb.Error as bad:
        raise lmdb_store.cannot_open(folder, bad) from None
    try:
        with begin(env) as txn:
            lmdb_store.check_format(folder, txn.get(lmdb_store.FORMAT_KEY))
            yield StoreSnapshot(folder, txn, {name: handle for name in TABLES if (handle := _table(env, txn, name)) is not None})
    except (lmdb.CorruptedError, lmdb.PageNotFoundError) as bad:
        raise lmdb_store.cannot_open(folder, bad) from None
    finally:
        env.close()


def begin(env: Any) -> Any:
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
        return None  # an older store has fewer tables

"""The groups of a store, read beside its broker: one consistent moment of them, without loading payloads."""

import contextlib
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec

from broker.state.consumers import payload_of
from broker.state.groups import DEAD, DROPPED, Group, Phase, field_key
from broker.state.records import Meta
from broker.store import KINDS, Damaged, Records
from broker.store.records import unpack_frames
from broker.store.reply_frames import assembled
from slimebus.bus.errors import UsageError
from slimebus.bus.sample_table import CheckedGroup, check_group

STATES: tuple[Phase, ...] = get_args(Phase)
NEAREST_OF = 20_000
"""Ids that are compared with one that is unknown."""


class StoreSnapshot:
    """The groups, prompts and samples of a store. Raises Damaged for a record that is not what was written."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def groups(self, states: Iterable[str] = ()) -> Iterator[Group]:
        """Groups in play, then ended ones; of these states, or of all."""
        wanted = set(states) or set(STATES)
        tables = [t for t in ("groups", "ended") if wanted & ({DROPPED, DEAD} if t == "ended" else set(STATES) - {DROPPED, DEAD})]
        for table in tables:
            for _, value in self.records.scan(table):
                if isinstance(value, Damaged):
                    raise value
                group = msgspec.msgpack.decode(value, type=Group)
                if group.phase in wanted:
                    yield group

    def group(self, name: str) -> Group:
        """One group. Raises UsageError naming the nearest ids."""
        found = (self.records.get("groups", name) or self.records.get("ended", name)) if name else None  # no key of the store is empty
        if found is not None:
            return msgspec.msgpack.decode(found, type=Group)
        known = [key for table in ("groups", "ended") for key, _ in zip(self.records.keys(table), range(NEAREST_OF), strict=False)]
        near = difflib.get_close_matches(name, known, 3, 0.4)
        hint = f"did you mean {', '.join(near)}?" if near else f"it holds {len(known)} groups; `slimebus buffer ls` lists them"
        raise UsageError(f"no group {name!r} in the store at {self.records.where}; {hint}")

    def prompt(self, name: str) -> dict[str, Any] | None:
        """The prompt record of a group: prompt, label, metadata; None where none is kept."""
        found = self.records.get("prompts", name)
        return None if found is None else msgspec.msgpack.decode(found, type=dict[str, Any])

    def samples(self, group: Group) -> CheckedGroup | None:
        """The stored samples of a group, late fields and all; None where it has none. Raises ProtocolError for what nobody can read."""
        found = self.records.get("payloads", group.id)
        if found is None:
            return None
        frames, late = unpack_frames(found, "payloads", group.id), []
        for field in payload_of(group).late:
            key = field_key(group.id, field.name)
            late.append((field, unpack_frames(self.records.get("fields", key) or b"", "fields", key)[0]))
        return check_group(assembled(frames, late, None) if late else frames)

    def num_freed_steps(self) -> int:
        """How many steps have no samples any more: every checkpoint that is kept is of a later one."""
        found = self.records.get("meta", "meta")
        return 0 if found is None else msgspec.msgpack.decode(found, type=Meta).oldest_kept_step


@contextlib.contextmanager
def open_snapshot(run_dir: Path, durability: str = "fsync", *, is_checked: bool = True) -> Iterator[StoreSnapshot]:
    """What the store of a run holds now, also beside a working broker. Raises UsageError when there is none, or it is damaged.

    is_checked=False: damage, which may end the process, is not looked for; of a store that its broker works with.
    """
    with KINDS[durability].read(run_dir / "broker", is_checked=is_checked) as records:
        yield StoreSnapshot(records)

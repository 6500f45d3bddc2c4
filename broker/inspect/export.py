"""Groups as a folder of files (slimebus/client/exported_groups.py), which other tools read. `slimebus buffer import`
takes them in again, and any jsonl file of prompts."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from broker.inspect.reader import StoreSnapshot
from broker.state.edits import IMPORTED
from broker.state.groups import Group
from broker.store.interface import Damaged
from slimebus.bus.errors import DataError, ProtocolError, UsageError
from slimebus.bus.messages import Import
from slimebus.bus.sample_table import check_group, encode_table
from slimebus.client.exported_groups import GROUPS_FILE, ExportedGroup, arrays_of, numbered_rows, read_frames, shard_name, write_arrays

SHARD_BYTES = 256 * 1024 * 1024
"""Arrays are written when so many are in memory."""


class Exported(msgspec.Struct):
    """What an export wrote, and the groups that it left out for damaged records, by id."""

    groups: int = 0
    samples: int = 0
    left_out: dict[str, str] = {}


def export_groups(snapshot: StoreSnapshot, groups: Iterator[Group], out: Path, *, shard_bytes: int = SHARD_BYTES) -> Exported:
    """Write the folder `out`, which appears when it is complete. Raises UsageError when it exists or cannot be written."""
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        raise UsageError(f"{out} exists already; name another folder for the export, or remove it")
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            done = _write(snapshot, groups, partial, shard_bytes)
            partial.rename(out)
        except OSError as bad:
            raise UsageError(f"cannot write {out}: {bad}; name a folder on a disk with room that this user may write") from None
    return done


def _write(snapshot: StoreSnapshot, groups: Iterator[Group], folder: Path, shard_bytes: int) -> Exported:
    done, shard, arrays = Exported(), 0, dict[str, np.ndarray]()
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            try:
                prompt, samples = snapshot.prompt(group.id), snapshot.samples(group)
                own_arrays = {} if samples is None else arrays_of(group.id, samples)
            except (Damaged, ProtocolError, msgspec.DecodeError) as bad:
                done.left_out[group.id] = str(bad)
                continue
            done.groups += 1
            if arrays and sum(a.nbytes for a in (*arrays.values(), *own_arrays.values())) > shard_bytes:
                write_arrays(arrays, folder / shard_name(shard))
                shard, arrays = shard + 1, {}
            arrays |= own_arrays
            row = {"group": group.id, **summary_of(group), "prompt": prompt}
            if samples is not None:
                row |= {"table": samples.table, "arrays": shard_name(shard)}
                done.samples += len(samples.samples)
            file.write(msgspec.json.encode(row) + b"\n")
    if arrays:
        write_arrays(arrays, folder / shard_name(shard))
    return done


ABOUT = (
    *("kind", "reason", "position", "failures", "step", "num_samples", "num_failed", "num_tokens"),
    *("size_bytes", "oldest_version", "newest_version"),
)


def summary_of(group: Group) -> dict[str, Any]:
    """What a person may want to know of a group, in every listing and export."""
    lease = {"attempt": group.lease.id, "worker": group.lease.worker, "lineage": group.lease.lineage}
    return {"state": group.phase} | lease | {name: getattr(group, name) for name in ABOUT}


# --- taking in again ---


class Incoming(msgspec.Struct):
    """One group to import: the message and its bulk frames."""

    message: Import
    frames: list[bytes]


class Row(ExportedGroup):
    """A line of an export, or of a file of prompts."""

    group: str = ""
    prompt: Any = None
    lineage: str = ""
    label: Any = None
    metadata: dict[str, Any] | None = None


def read_groups(path: Path, *, prompts_only: bool = False) -> Iterator[Incoming]:
    """The groups of an export or a jsonl file of prompts, each checked. Raises DataError naming file, line and reason.

    prompts_only: leave the samples out.
    """
    file = path / GROUPS_FILE if path.is_dir() else path
    for number, row in numbered_rows(file, Row):
        if isinstance(row, DataError):
            raise row
        yield _incoming(f"{file}:{number}", path, row, number, prompts_only)


def _incoming(place: str, path: Path, row: Row, number: int, prompts_only: bool) -> Incoming:
    name = row.group or f"{path.name}/{number}"
    prompt = row.prompt
    if not isinstance(prompt, dict):
        prompt = {"prompt": prompt, "label": row.label, "metadata": row.metadata or {}}
    if not isinstance(prompt.get("prompt"), str | list):
        raise DataError(f"{place}: group {name!r} has no prompt; expected text, or a list of chat messages, under 'prompt'")
    message = Import(group=name if name.startswith(IMPORTED) else IMPORTED + name, lineage=row.lineage)
    frames = [msgspec.msgpack.encode(prompt)]
    if row.table is not None and not prompts_only:
        try:
            frames += [encode_table(row.table), *read_frames(path / Path(row.arrays).name, row.group, row.table)]
            check_group(frames[1:])
        except ProtocolError as bad:
            raise DataError(f"{place}: group {name!r}: {bad.text}") from None
    return Incoming(message, frames)

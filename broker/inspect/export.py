"""Groups as a folder of files (slimebus/client/exported_groups.py), which other tools read and `slimebus buffer import` takes in again."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from broker.inspect.reader import StoreSnapshot
from broker.state.groups import Group
from broker.store.interface import Damaged
from slimebus.bus.errors import ProtocolError, UsageError
from slimebus.client.exported_groups import GROUPS_FILE, arrays_of, shard_name, write_arrays

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

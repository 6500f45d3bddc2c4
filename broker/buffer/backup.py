"""A consistent copy of a store while its broker writes, and a run directory made from one."""

import os
import shutil
import time
from pathlib import Path
from typing import Any

import lmdb
import msgspec

from broker.buffer.reader import live_endpoint, moment_of, store_folder
from broker.store.lmdb_store import cannot_open, open_environment
from broker.store.pages import check_pages
from broker.store.space import free_bytes, in_words
from slimebus.errors import SlimebusError, UsageError


def back_up(run_dir: Path, target: Path) -> dict[str, Any]:
    """Copy the store to `target`/broker, one moment of it, without its free pages; what it holds, for a person.

    Raises UsageError when the target holds a store already or its disk has no room; nothing is left of a copy that failed.
    """
    folder, copy = store_folder(run_dir), target / "broker"
    if (copy / "data.mdb").exists():
        raise UsageError(f"{target} holds a backup already; name another folder, or remove it")
    used = (folder / "data.mdb").stat().st_blocks * 512
    try:
        copy.mkdir(parents=True, exist_ok=True)
    except OSError as bad:
        raise UsageError(f"cannot write a backup to {target}: {bad}") from None
    if free_bytes(copy) < used // 2:
        raise UsageError(f"{target} has {in_words(free_bytes(copy))} free, the store takes up to {in_words(used)}; choose another disk")
    try:
        _copy(folder, copy)
    except BaseException:
        shutil.rmtree(copy, ignore_errors=True)
        raise
    return _describe(target)


def _copy(folder: Path, copy: Path) -> None:
    partial = copy / "partial"
    partial.mkdir(exist_ok=True)
    try:
        env = open_environment(folder, is_readonly=True)
        try:
            env.copy(str(partial), compact=True)
        finally:
            env.close()
    except lmdb.Error as bad:
        raise SlimebusError(f"the store at {folder} could not be copied to {copy}: {bad}", code="store") from None
    check_pages(partial)
    with (partial / "data.mdb").open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial / "data.mdb", copy / "data.mdb")
    partial.rmdir()


def _describe(target: Path) -> dict[str, Any]:
    with moment_of(target) as moment:
        meta = moment.meta()
        size = (moment.path / "data.mdb").stat().st_size
        about = {"run": meta.run, "step": meta.next_step, "checkpoint": meta.floor, "groups": moment.count("groups"), "size_bytes": size}
    about["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    (target / "backup.json").write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1))
    return about


def restore(backup: Path, run_dir: Path) -> dict[str, Any]:
    """Make `run_dir`/broker from a backup. A store that is there is set aside, never written over.

    Raises UsageError for a backup that is none or is damaged, and while a broker has the run directory open.
    """
    source, folder = store_folder(backup), run_dir / "broker"
    check_pages(source)
    if live_endpoint(folder) is not None:
        raise UsageError(f"a broker has the store at {folder} open; stop it first")
    used = (source / "data.mdb").stat().st_size
    try:
        aside = _set_aside(folder)
        folder.mkdir(parents=True)
        if free_bytes(folder) < used:
            raise UsageError(f"{folder} has {in_words(free_bytes(folder))} free, the backup has {in_words(used)}; make room there")
        shutil.copyfile(source / "data.mdb", folder / "data.mdb.partial")
        with (folder / "data.mdb.partial").open("rb") as file:
            os.fsync(file.fileno())
        os.replace(folder / "data.mdb.partial", folder / "data.mdb")
    except OSError as bad:
        raise cannot_open(folder, bad) from None
    with moment_of(run_dir) as moment:
        meta = moment.meta()
        return {"run": meta.run, "step": meta.next_step, "groups": moment.count("groups"), "set_aside": str(aside or "")}


def _set_aside(folder: Path) -> Path | None:
    if not (folder / "data.mdb").exists():
        return None
    aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}.before-restore-{n}")).exists())
    folder.rename(aside)
    return aside

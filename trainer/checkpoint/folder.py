"""Where checkpoints lie in a folder, and which one is the newest. No torch.

DIR/
  latest                     name of the newest complete checkpoint, replaced atomically after everything else is on disk
  step_00000012/             any tensor, pipeline, data, context or expert parallel layout can read it
    state.json               step, version, lineage, and each file with its BLAKE3 and what is in it (trainer/checkpoint/manifest.py)
    rank_00000.safetensors   what one rank wrote; without a disk that nodes share, each node has those of its own ranks
  step_00000013.part/        being written, or left by a process that died: never read, removed by the next save
  step_00000012.damaged/     found damaged when it was to be loaded, while an older one was whole; removed by the next save
"""

import contextlib
import re
import shutil
from pathlib import Path

from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError
from trainer.checkpoint.manifest import MANIFEST

LATEST = "latest"
MAX_SHOWN = 100
"""Characters of what `latest` says: no name is longer."""


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The checkpoint that `latest` names, or None without one. Raises DataError when it names one that is not there."""
    name = latest_name(folder)
    if name is None:
        return None
    path = Path(folder) / name
    if path not in complete_checkpoints(folder):
        text = f"names {name!r}, which is not a complete checkpoint; write the name of a step_* folder into it"
        raise DataError(f"{Path(folder) / LATEST}: {text}")
    return path


def latest_name(folder: str | Path) -> str | None:
    """What `latest` says, None without one. Raises DataError when it cannot be read."""
    pointer = Path(folder) / LATEST
    try:
        return pointer.read_text(errors="replace").strip()[:MAX_SHOWN]
    except FileNotFoundError:
        return None
    except OSError as bad:
        raise DataError(f"{pointer}: {bad.strerror}; it is a file with the name of a checkpoint: remove what is there") from None


def loadable_checkpoints(folder: str | Path) -> list[Path]:
    """What a trainer may go on from: the one that `latest` names, complete or not, then the complete ones before it, newest first.

    All that are complete, where `latest` is missing or names no step. Raises DataError when it names something and there is none, and as
    latest_name.
    """
    complete = complete_checkpoints(folder)[::-1]
    name = latest_name(folder)
    if name is not None and not complete:
        latest_checkpoint(folder)
    if name is None or not is_checkpoint_name(name):
        return complete
    named = Path(folder) / name
    return [named, *(path for path in complete if path != named and step_of(path) <= step_of(named))]


def saved_step(folder: str | Path) -> int | None:
    """The step that the newest complete checkpoint under `folder` goes on with, None without one. Raises DataError as latest_checkpoint."""
    latest = latest_checkpoint(folder)
    return step_of(latest) if latest else None


def oldest_step(folder: str | Path) -> int | None:
    """The step of the oldest complete checkpoint under `folder`, None without one."""
    return min(map(step_of, complete_checkpoints(folder)), default=None)


def complete_checkpoints(folder: str | Path) -> list[Path]:
    """Checkpoints that were written to their end, oldest first."""
    return [path for path in named_checkpoints(folder) if (path / MANIFEST).exists()]


def named_checkpoints(folder: str | Path) -> list[Path]:
    """The folders that have the name of a checkpoint, oldest first: not those being written."""
    return sorted((path for path in Path(folder).glob("step_*") if is_checkpoint_name(path.name)), key=step_of)


def is_checkpoint_name(name: str) -> bool:
    """Whether it is a name that a checkpoint has."""
    return re.fullmatch(r"step_[0-9]{1,18}", name) is not None


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint goes on with, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def name_of(step: int) -> str:
    """The name of the checkpoint that goes on with `step`."""
    return f"step_{step:08d}"


def clear_unfinished(folder: Path) -> None:
    """Remove what earlier saves left half-written. Another node may do so at the same time."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step_*.part"):
        remove(leftover)


def remove(path: Path) -> None:
    """Remove a folder, or a file that is in its way, as far as possible: what stays is removed by a later save."""
    if not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def complete(building: Path, target: Path, manifest: bytes) -> None:
    """Give a written checkpoint its name; an older one of that name goes. Does nothing where another node has done it."""
    try:
        if (target / MANIFEST).read_bytes() == manifest:
            return
    except OSError:
        pass
    with replacing(building / MANIFEST) as file:
        file.write(manifest)
    if target.exists():
        target.rename(target.with_name(f"{target.name}.old.part"))
    building.rename(target)


def point_at(target: Path) -> None:
    """Make a complete checkpoint the one that is loaded."""
    with replacing(target.with_name(LATEST)) as pointer:
        pointer.write(target.name.encode())


def prune(target: Path, keep: int) -> None:
    """Remove the oldest beyond `keep`, which counts `target`, those found damaged, and those after `target`: of a timeline that was left
    when somebody went back to an older one. Another node may do so at the same time.
    """
    others = [path for path in named_checkpoints(target.parent) if path != target]
    before = [path for path in others if step_of(path) <= step_of(target)]
    old, abandoned = before[: max(0, len(before) - (keep - 1))], others[len(before) :]
    for path in (*old, *abandoned, *target.parent.glob("step_*.damaged"), *target.parent.glob("step_*.old.part")):
        remove(path)


def set_aside(damaged: Path) -> None:
    """Keep it under another name until the next save. Another node may do so too."""
    aside = damaged.with_name(f"{damaged.name}.damaged")
    with contextlib.suppress(FileNotFoundError):
        if damaged.exists():
            remove(aside)
            damaged.rename(aside)

"""Where checkpoints lie in a folder, and which one is the newest. No torch.

DIR/
  latest                 name of the newest complete checkpoint, replaced atomically after everything else is on disk
  step_00000012/         Megatron's torch_dist files (any tensor, pipeline or data-parallel layout can read them)
    state.json           step, version, num_updates, lineage
    random_00000.safetensors   one a rank; read only by as many ranks as wrote it
  step_00000013.part/    being written, or left by a process that died: never read, removed by the next save
"""

import re
import shutil
from pathlib import Path

from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError

LATEST = "latest"


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None. Raises DataError when `latest` names one that is not there."""
    pointer = Path(folder) / LATEST
    if not pointer.exists():
        return None
    path = Path(folder) / pointer.read_text().strip()
    if path not in named_checkpoints(folder) or not (path / "state.json").exists():
        raise DataError(f"{pointer}: names {path.name}, which is not a complete checkpoint; write the name of a step_* folder into it")
    return path


def saved_step(folder: str | Path) -> int | None:
    """The step that the newest complete checkpoint under `folder` goes on with, None without one. Raises DataError as latest_checkpoint."""
    latest = latest_checkpoint(folder)
    return step_of(latest) if latest else None


def oldest_step(folder: str | Path) -> int | None:
    """The step of the oldest complete checkpoint under `folder`, None without one."""
    return min((step_of(path) for path in named_checkpoints(folder) if (path / "state.json").exists()), default=None)


def named_checkpoints(folder: str | Path) -> list[Path]:
    """The folders that have the name of a checkpoint, oldest first: not those being written."""
    return sorted((path for path in Path(folder).glob("step_*") if re.fullmatch(r"step_\d+", path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint goes on with, from its name."""
    return int(checkpoint.name.removeprefix("step_"))


def clear_unfinished(folder: Path) -> None:
    """Remove what earlier saves left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step_*.part"):
        shutil.rmtree(leftover)


def complete_and_prune(building: Path, target: Path, keep: int) -> None:
    """Give a complete checkpoint its name, point `latest` at it, and remove the oldest beyond `keep`."""
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    with replacing(target.with_name(LATEST)) as pointer:
        pointer.write(target.name.encode())
    others = [path for path in named_checkpoints(target.parent) if path != target]
    for path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path)

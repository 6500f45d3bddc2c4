"""Where checkpoints lie in a folder, and which one is the newest. No torch.

DIR/
  latest                 name of the newest complete checkpoint, replaced atomically after everything else is on disk
  step_00000012/         Megatron's torch_dist files (any tensor, pipeline or data-parallel layout can read them)
    state.json           step, num_updates, and the caller's extra
    random_00000.safetensors   one a rank; read only by as many ranks as wrote it
  step_00000013.part/    being written, or left by a process that died: never read, removed by the next save
"""

import os
import shutil
from pathlib import Path

from slimebus.errors import DataError

LATEST = "latest"


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None. Raises DataError when `latest` names one that is not there."""
    pointer = Path(folder) / LATEST
    if not pointer.exists():
        return None
    path = Path(folder) / pointer.read_text().strip()
    if not (path / "state.json").exists():
        raise DataError(f"{pointer}: names {path.name}, which is not a complete checkpoint; write the name of a step_* folder into it")
    return path


def clear_unfinished(folder: Path) -> None:
    """Remove what earlier saves left half-written."""
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob("step_*.part"):
        shutil.rmtree(leftover)


def finish(building: Path, target: Path, keep: int) -> None:
    """Give a complete checkpoint its name, point `latest` at it, and remove the oldest beyond `keep`."""
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)
    pointer = target.with_name(LATEST + ".part")
    with pointer.open("w") as stream:
        stream.write(target.name)
        stream.flush()
        os.fsync(stream.fileno())
    pointer.replace(target.with_name(LATEST))
    others = sorted(path for path in target.parent.glob("step_*") if path != target and path.suffix != ".part")
    for path in others[: max(0, len(others) - (keep - 1))]:
        shutil.rmtree(path)

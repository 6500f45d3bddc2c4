"""Where checkpoints lie in a folder, and which one is the newest. No torch.

DIR/
  latest                     name of the newest complete checkpoint, replaced atomically after everything else is on disk
  step_00000012/             any tensor, pipeline, data, context or expert parallel layout can read it
    state.json               `CheckpointManifest`: step, version, lineage, and each file with its BLAKE3 and what is in it
    rank_00000.safetensors   what one rank wrote; without a disk that nodes share, each node has those of its own ranks
  step_00000013.part/        being written, or left by a process that died: never read, removed by the next save
  step_00000012.damaged/     found damaged when it was to be loaded, while an older one was whole; removed by the next save
"""

import contextlib
import re
import shutil
from pathlib import Path

import msgspec

from slimebus.atomic_file import replacing
from slimebus.bus.errors import DataError
from slimebus.weights.tensors import hash_bytes
from trainer.checkpoint.boxes import Box, Shape

MANIFEST = "state.json"
FORMAT = 2
"""1 was Megatron's torch_dist."""


class Progress(msgspec.Struct):
    """The step that is trained next and its version, the steps of the learning-rate schedule, and the lineage that saved it.

    position: of a critic, up to which it has learned from the groups of the bus.
    """

    step: int
    version: int
    num_updates: int
    lineage: str = ""
    position: int = 0


class TensorPart(msgspec.Struct, array_like=True, frozen=True):
    """A box of the tensor `key`, at byte `at` of its file."""

    key: str
    offset: Shape
    shape: Shape
    dtype: str
    at: int

    @property
    def box(self) -> Box:
        """Where it lies in the whole tensor."""
        return self.offset, self.shape


class RankFile(msgspec.Struct):
    """What one rank wrote; host: where, as without a shared disk no other node has it."""

    name: str
    host: str
    num_bytes: int
    blake3: str
    parts: list[TensorPart]


class CheckpointManifest(msgspec.Struct, forbid_unknown_fields=True):
    """All of a checkpoint. shapes: of the whole tensors. layout: sizes of the parallel dimensions of the ranks that wrote it."""

    format: int
    progress: Progress
    adam_step: int
    layout: dict[str, int]
    shapes: dict[str, Shape]
    files: list[RankFile]
    blake3: str = ""
    """Of this manifest with an empty one here."""

    def encode(self) -> bytes:
        """What state.json holds."""
        self.blake3 = ""
        self.blake3 = hash_bytes(msgspec.json.encode(self))
        return msgspec.json.encode(self)


def decode_manifest(payload: bytes) -> CheckpointManifest:
    """The inverse of Manifest.encode. Raises DataError when it is not what was written."""
    try:
        found = msgspec.json.decode(payload, type=CheckpointManifest)
    except (msgspec.DecodeError, RecursionError):
        found = None
    if found is None or found.encode() != payload:
        raise DataError(f"{MANIFEST} is not what was written")
    return found


def read_manifest(checkpoint: Path) -> bytes:
    """The bytes of a checkpoint's state.json, checked. Raises DataError when they are missing or not what was written."""
    try:
        payload = (checkpoint / MANIFEST).read_bytes()
    except OSError as bad:
        raise DataError(f"{MANIFEST}: {bad.strerror}") from None
    decode_manifest(payload)
    return payload


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
    return [path for path in named_checkpoints(folder) if is_complete(path)]


def is_complete(checkpoint: Path) -> bool:
    """Whether it was written to its end: its manifest is written last."""
    return (checkpoint / MANIFEST).exists()


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
        remove_path(leftover)


def remove_path(path: Path) -> None:
    """Remove a folder, or a file that is in its way, as far as possible: what stays is removed by a later save."""
    if not path.is_dir():
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def move_into_place(building: Path, target: Path, manifest: bytes) -> None:
    """Complete a written checkpoint: add its manifest and give it its name. An older one of that name goes. Does nothing where another node
    has done it."""
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


def write_latest(target: Path) -> None:
    """Let `latest` name this complete checkpoint: it is the one that is loaded."""
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
        remove_path(path)


def set_aside_damaged(damaged: Path) -> None:
    """Keep a damaged checkpoint under another name until the next save. Another node may do so too."""
    aside = damaged.with_name(f"{damaged.name}.damaged")
    with contextlib.suppress(FileNotFoundError):
        if damaged.exists():
            remove_path(aside)
            damaged.rename(aside)

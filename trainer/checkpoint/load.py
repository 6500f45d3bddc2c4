"""How a policy goes on from a checkpoint: the newest that is whole, read in any layout.

Every file is checked against its hash by one rank that sees it, before anything of the policy changes. Then each rank maps the files
that it sees and copies the boxes it needs; what only another node has is sent by a rank there.
"""

import logging
import math
import socket
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from slimebus.bus.errors import DataError
from trainer.checkpoint import trained_state
from trainer.checkpoint.boxes import overlap, slices_in
from trainer.checkpoint.folder import (
    MANIFEST,
    CheckpointManifest,
    Progress,
    TensorPart,
    decode_manifest,
    latest_name,
    loadable_checkpoints,
    name_of,
    read_manifest,
    set_aside_damaged,
    step_of,
    write_latest,
)
from trainer.checkpoint.rank_file import OpenFile, has_its_hash, problem_with, torch_dtype
from trainer.checkpoint.trained_state import LocalBox
from trainer.model import parallel
from trainer.model.learner import Learner

log = logging.getLogger("trainer")


def load_checkpoint(folder: str | Path, policy: Learner) -> Progress | None:
    """Continue from the newest whole checkpoint under `folder` exactly as if there had been no stop; every rank calls it.

    None, on every rank, when no node has a checkpoint. One that is damaged is passed over for the one before it; a line of the log says
    which file and what is lost. Raises DataError when none is whole, or when they are of another model.
    """
    names = _agreed_names(Path(folder))
    problems: dict[str, str] = {}
    for name in names:
        checkpoint = _open_whole(Path(folder) / name)
        if isinstance(checkpoint, _Checkpoint):
            _make_latest(Path(folder), problems, name)
            return checkpoint.load(policy)
        problems[name] = checkpoint
    if not names:
        return None
    listed = "; ".join(f"{name}: {problem}" for name, problem in problems.items())
    remedy = "bring the files back, write the name of a whole one into latest, or move the folder away to begin at step 0"
    raise DataError(f"{folder}: no checkpoint is whole ({listed}); {remedy}")


def load_step(folder: str | Path, policy: Learner, step: int) -> Progress:
    """Continue from the checkpoint of this step and no other; every rank calls it. Raises DataError when it is not whole."""
    return _open_complete(Path(folder) / name_of(step)).load(policy)


def load_weights(folder: str | Path, policy: Learner, step: int | None = None) -> Progress | None:
    """The weights alone, of the newest checkpoint or of the one that goes on with `step`; every rank calls it. None when there is none.

    Raises DataError when it is damaged; no other takes its place.
    """
    names = _agreed_names(Path(folder)) if step is None else [name_of(step)]
    if not names:
        return None
    checkpoint = _open_complete(Path(folder) / names[0])
    checkpoint.copy_to(list(trained_state.weights(policy)))
    return checkpoint.manifest.progress


def _agreed_names(folder: Path) -> list[str]:
    """Rank 0's checkpoints, newest first; those of the first rank that has some, when rank 0 has none."""
    mine = [path.name for path in loadable_checkpoints(folder)]
    return next((names for names in parallel.gather(mine, list[str]) if names), [])


def _make_latest(folder: Path, problems: dict[str, str], whole: str) -> None:
    """Set what is damaged aside, and let `latest` name the one that is whole, on every node that has it."""
    for name, problem in problems.items():
        first, last = step_of(Path(whole)), step_of(Path(name)) - 1
        steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
        lost = f"{steps} trained again, on their samples where the broker has them"
        log.error("checkpoint %s is damaged: %s; going on from %s: %s", name, problem, whole, lost)
        if parallel.is_first_of_node():
            set_aside_damaged(folder / name)
    if parallel.is_first_of_node() and (folder / whole).exists() and (said := latest_name(folder)) != whole:
        if not problems:
            found = f"says {said!r}" if said is not None else "is missing"
            log.warning("%s %s: going on from the newest, %s", folder / "latest", found, whole)
        write_latest(folder / whole)
    dist.barrier()


def _open_whole(path: Path) -> "_Checkpoint | str":
    """The checkpoint, found whole, or what is wrong with it; the same on every rank."""
    try:
        mine = read_manifest(path)
        problem = ""
    except DataError as bad:
        mine, problem = b"", bad.text
    manifests = parallel.gather_bytes(mine)
    whole = next((payload for payload in manifests if payload), None)
    if whole is None:
        return parallel.gather(problem, str)[0]
    checkpoint = _Checkpoint(path, decode_manifest(whole))
    if (step := checkpoint.manifest.progress.step) != step_of(path):
        return f"{MANIFEST} is that of step {step}"
    return checkpoint.find_files() or checkpoint


def _open_complete(path: Path) -> "_Checkpoint":
    """As _open. Raises DataError for what is wrong with it."""
    checkpoint = _open_whole(path)
    if not isinstance(checkpoint, _Checkpoint):
        raise DataError(f"{path}: {checkpoint}; bring it back from a copy, or take the checkpoint of another step")
    return checkpoint


class _Checkpoint:
    """A checkpoint on the disks of all nodes. `seen_by`: the ranks that have each file, by its number."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self.path, self.manifest = path, manifest
        self.seen_by: list[list[int]] = []
        self._open: dict[int, OpenFile] = {}
        self._parts: dict[str, list[tuple[int, TensorPart]]] = defaultdict(list)
        for number, file in enumerate(manifest.files):
            for part in file.parts:
                self._parts[part.key].append((number, part))

    # --- is it whole ---

    def find_files(self) -> str:
        """Look which ranks see which file, and check each file on one of them; what is wrong, or nothing."""
        files, rank = self.manifest.files, dist.get_rank()
        mine = {file.name: problem_with(self.path / file.name, file) for file in files}
        everyone = parallel.gather(mine, dict[str, str])
        self.seen_by = [[i for i, problems in enumerate(everyone) if not problems[file.name]] for file in files]
        lacking = [i for i, ranks in enumerate(self.seen_by) if not ranks]
        if lacking:
            worst = max((problems[files[lacking[0]].name] for problems in everyone), key=lambda text: text != "is missing")
            return f"{files[lacking[0]].name}, written on {files[lacking[0]].host}, {worst}"
        checked = [i for i, ranks in enumerate(self.seen_by) if ranks[i % len(ranks)] == rank]
        wrong = [files[i].name for i in checked if not has_its_hash(self.path / files[i].name, files[i])]
        found = [f"{name} on {socket.gethostname()} is not what was written (BLAKE3)" for name in wrong]
        return next(filter(None, parallel.gather("; ".join(found), str)), "")

    # --- take it ---

    def load(self, policy: Learner) -> Progress:
        """Copy all of it into the policy."""
        has_reference = any(key.startswith(f"{trained_state.REFERENCE}.") for key in self.manifest.shapes)
        for part in trained_state.contents(policy, has_reference=has_reference):
            self.copy_to(part)
        if policy.reference is not None:  # one that was not refreshed is that of the model's folder, which the policy was built with
            policy.reference.is_refreshed |= has_reference
        trained_state.set_adam_step(policy, self.manifest.adam_step)
        self._load_random_state()
        progress = self.manifest.progress
        policy.num_updates = progress.num_updates
        return progress

    def _load_random_state(self) -> None:
        now = trained_state.layout()
        if now != self.manifest.layout:
            changed = ", ".join(
                f"{name} {self.manifest.layout.get(name)} -> {size}" for name, size in now.items() if self.manifest.layout.get(name) != size
            )
            log.warning("%s is of another layout (%s): dropout goes on from the seed, not from its random state", self.path.name, changed)
            return
        states = trained_state.random_state()
        self.copy_to(trained_state.random_boxes(states))
        trained_state.restore_random_state(states)

    @torch.no_grad()
    def copy_to(self, boxes: list[LocalBox]) -> None:
        """Fill these boxes of this rank. Every rank calls it. Raises DataError when the checkpoint is of another model."""
        wanted: dict[tuple[int, int], list[LocalBox]] = defaultdict(list)
        parts = {(number, part.at): part for number, file in enumerate(self.manifest.files) for part in file.parts}
        for local in boxes:
            for number, part in self._parts_of(local):
                wanted[number, part.at].append(local)
        seen = {place for place in wanted if dist.get_rank() in self.seen_by[place[0]]}
        for place in sorted(seen):
            tensor = self._read(place[0], parts[place])
            for local in wanted[place]:
                _copy(tensor, parts[place], local)
        absent = parallel.gather(sorted(wanted.keys() - seen), list[tuple[int, int]])
        for place in sorted(set(chain.from_iterable(absent))):  # what some rank does not see and wants, the same on every rank
            tensor = self._broadcast(place[0], parts[place])
            for local in wanted.get(place, ()):
                _copy(tensor, parts[place], local)

    def _parts_of(self, local: LocalBox) -> Iterator[tuple[int, TensorPart]]:
        """The parts that overlap a box of this rank. Raises DataError unless they cover it."""
        found = [(number, part) for number, part in self._parts[local.key] if overlap(local.box, part.box)]
        shape = self.manifest.shapes.get(local.key)
        if shape is None or (shape != local.whole and not local.may_be_padded):
            has = "no such tensor" if shape is None else f"shape {list(shape)}"
            raise DataError(f"{self.path}: of another model: {local.key} has shape {list(local.whole)} here, there {has}")
        covered = sum(math.prod(shared[1]) for _, part in found if (shared := overlap(local.box, part.box)))
        if covered < math.prod(local.shape) and not local.may_be_padded:
            raise DataError(f"{self.path}: {covered} of {math.prod(local.shape)} entries of {local.key} at {list(local.offset)} are saved")
        yield from found

    def _read(self, number: int, part: TensorPart) -> torch.Tensor:
        if number not in self._open:
            self._open[number] = OpenFile(self.path / self.manifest.files[number].name)
        return self._open[number].tensor(part)

    def _broadcast(self, number: int, part: TensorPart) -> torch.Tensor:
        source = self.seen_by[number][0]
        if dist.get_rank() == source:
            tensor = self._read(number, part).to(parallel.device())
        else:
            tensor = torch.empty(part.shape, dtype=torch_dtype(part), device=parallel.device())
        dist.broadcast(tensor, source)
        return tensor


def _copy(tensor: torch.Tensor, part: TensorPart, local: LocalBox) -> None:
    shared = overlap(local.box, part.box)
    assert shared is not None  # that is why it was wanted
    local.tensor.view(local.shape)[slices_in(shared, local.box)].copy_(tensor[slices_in(shared, part.box)])

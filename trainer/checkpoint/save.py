"""How a checkpoint is saved: each rank its part, beside the next steps."""

import contextlib
import logging
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from slimebus.bus.errors import SlimebusError
from trainer.checkpoint import trained_state
from trainer.checkpoint.folder import (
    FORMAT,
    CheckpointManifest,
    Progress,
    RankFile,
    clear_unfinished,
    move_into_place,
    name_of,
    prune,
    write_latest,
)
from trainer.checkpoint.rank_file import write_rank_file
from trainer.checkpoint.trained_state import LocalBox
from trainer.model import parallel
from trainer.model.learner import Learner

log = logging.getLogger("trainer")


class RankReport(msgspec.Struct):
    """What a rank tells the others at the end: its file, or the problem, and what its part of the tensors says of the whole ones."""

    file: RankFile | None
    problem: str
    shapes: dict[str, tuple[int, ...]]
    adam_step: int


class BackgroundSave:
    """One checkpoint on its way to the disk: copied between two steps, written by a thread beside the next ones. Every rank makes one and
    makes the same calls. A crash at any moment leaves the checkpoint before in place.

    BackgroundSave()   every rank copies its part to host memory and begins to write      .part
    is_written()       all ranks ask between two steps
    finish()           every file is on disk: rank 0's manifest, the name, `latest`       step_N

    confirm: asked on the main rank before anything is written and again before the checkpoint becomes the latest; when it raises, the
    one before stays.
    """

    def __init__(self, folder: str | Path, policy: Learner, progress: Progress, confirm: Callable[[], None] = lambda: None) -> None:
        self.step, self._confirm, self._progress = progress.step, confirm, progress
        self._target = Path(folder) / name_of(progress.step)
        self._building = self._target.with_name(f"{self._target.name}.part")
        self._prepare()
        self._adam_step = trained_state.adam_step(policy)
        boxes = self._copy_to_host(policy)
        self._shapes = {box.key: box.whole for box in boxes}
        self._path = self._building / f"rank_{dist.get_rank():05d}.safetensors"
        self._file: Future[RankFile] = Future()
        # a daemon: a disk that does not answer must not keep the process from leaving
        threading.Thread(target=self._write_file, args=(boxes,), name="checkpoint", daemon=True).start()

    def _prepare(self) -> None:
        if parallel.is_main_rank():
            self._confirm()
        dist.barrier()
        if parallel.is_first_of_node():
            with contextlib.suppress(OSError):  # the next write there says what is wrong
                clear_unfinished(self._target.parent)
        dist.barrier()

    @torch.no_grad()
    def _copy_to_host(self, policy: Learner) -> list[LocalBox]:
        """What this rank writes, in host memory; the steps that follow do not touch it."""
        has_reference = policy.reference is not None and policy.reference.is_refreshed
        boxes = [copy for part in trained_state.contents(policy, has_reference=has_reference) for copy in host_copies(part)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return boxes + trained_state.random_boxes(trained_state.random_state())

    def _write_file(self, boxes: list[LocalBox]) -> None:
        try:
            self._building.mkdir(parents=True, exist_ok=True)
            self._file.set_result(write_rank_file(self._path, socket.gethostname(), boxes))
        except Exception as bad:  # noqa: BLE001  # the ranks hear of any of them in finish()
            self._file.set_exception(bad)

    def is_written(self) -> bool:
        """Whether every rank has written its file, or failed to. Every rank calls it."""
        return all(parallel.gather(self._file.done(), bool))

    def finish(self, keep: int, timeout_s: float | None = None) -> None:
        """Wait for all ranks, make it the latest checkpoint, and remove the oldest beyond `keep`. Every rank calls it.

        Raises SlimebusError `checkpoint`, on every rank, when a file could not be written, or not in timeout_s; the one
        before then stays.
        """
        manifest = self._manifest(timeout_s)
        if parallel.is_main_rank():
            self._confirm()
        self._write_on_ranks(parallel.is_main_rank(), lambda: move_into_place(self._building, self._target, manifest))
        self._write_on_ranks(parallel.is_first_of_node(), lambda: move_into_place(self._building, self._target, manifest))
        self._write_on_ranks(parallel.is_first_of_node(), lambda: write_latest(self._target))
        if parallel.is_first_of_node():
            prune(self._target, keep)
        dist.barrier()

    def _write_on_ranks(self, is_mine: bool, write: Callable[[], None]) -> None:
        """Write on the ranks that are to, while the others wait. Raises SlimebusError `checkpoint`, on every rank, when one could not."""
        problem = ""
        if is_mine:
            try:
                write()
            except OSError as bad:
                problem = str(bad)
        self._raise_problems(parallel.gather(problem, str))

    def _raise_problems(self, problems: list[str]) -> None:
        for rank, problem in enumerate(problems):
            if problem:
                raise SlimebusError(f"checkpoint of step {self.step}: rank {rank}: {problem} ({self._target.parent})", code="checkpoint")

    def _manifest(self, timeout_s: float | None) -> bytes:
        ranks = parallel.gather(self._await_file(timeout_s), RankReport)
        self._raise_problems([written.problem for written in ranks])
        files = [written.file for written in ranks if written.file is not None]
        shapes = {key: shape for written in ranks for key, shape in written.shapes.items()}
        check_tensors_complete(files, shapes)
        adam_step = max(written.adam_step for written in ranks)
        return CheckpointManifest(FORMAT, self._progress, adam_step, trained_state.layout(), shapes, files).encode()

    def _await_file(self, timeout_s: float | None) -> RankReport:
        file, problem = None, ""
        try:
            file = self._file.result(timeout_s)
        except TimeoutError:
            problem = f"{self._building} is not written after {timeout_s:.0f} s"
        except Exception as bad:  # noqa: BLE001
            problem = f"{bad}"
        return RankReport(file, problem, self._shapes, self._adam_step)


def check_tensors_complete(files: list[RankFile], shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise SlimebusError unless every tensor is in the files once and whole: what cannot be loaded must not replace what can."""
    saved: Counter[str] = Counter()
    for file in files:
        for part in file.parts:
            saved[part.key] += math.prod(part.shape)
    for key, shape in shapes.items():
        if saved[key] != math.prod(shape):
            raise SlimebusError(f"checkpoint: {saved[key]} entries of {key} are written, it has {math.prod(shape)}", code="checkpoint")


def host_copies(boxes: Iterable[LocalBox]) -> Iterator[LocalBox]:
    """Those that this rank saves, in host memory."""
    for local in boxes:
        if local.is_saved:
            copy = torch.empty(local.tensor.shape, dtype=local.tensor.dtype, pin_memory=local.tensor.is_cuda)
            yield local._replace(tensor=copy.copy_(local.tensor, non_blocking=True))

"""Steps on disk, each in the files of an export, for `slimebus view` and `slimebus trainer --replay`: those that went wrong, with what else
it takes to train them again, and the newest samples of the run.

RUN_DIR/dumps/step_00000041-nonfinite/
  groups.jsonl, arrays-00000.safetensors   the batch (slimebus/client/exported_groups.py)
  batches.jsonl                            the step, its version, its groups
  random_00000.safetensors                 the random state of each rank before the step
  dump.json                                the reason, the step's metrics, the config, the step of the newest checkpoint
RUN_DIR/samples/step_00000041/             the batch of a step that went well
"""

import contextlib
import logging
import math
import shutil
import statistics
from collections import deque
from pathlib import Path

import msgspec
import torch

from slimebus.bus.errors import SlimebusError
from slimebus.client.exported_groups import BATCHES_FILE, SAMPLES_FOLDER, read_groups, step_folders, write_arrays, write_groups
from slimebus.config import Resolved
from trainer.checkpoint.folder import saved_step
from trainer.session.replay import random_file
from trainer.session.step_batch import StepBatch

log = logging.getLogger("trainer")

SPIKE = 10.0
"""So many times the median of the steps before is a spike, of the gradient norm or of the loss's absolute value."""
LEAST_LOSS = 0.5
"""A smaller loss is no spike: that of a policy gradient is about 0, and a multiple of that says nothing."""
MIN_STEPS, WINDOW = 16, 64
"""Steps that are needed to call something a spike; their median is compared with."""
MAX_DUMPS = 4
"""A run keeps so many, the first ones: what comes after a step that went wrong is often its consequence."""
MAX_BYTES = 1 << 30
"""A larger batch is not dumped."""


class SpikeDetector:
    """Whether a value is far above those before it. A spike is not counted among them."""

    def __init__(self, least: float = 0.0) -> None:
        self.least = least
        self._before: deque[float] = deque(maxlen=WINDOW)

    def is_spike(self, value: float) -> bool:
        """Whether |value| is more than SPIKE times the median, and more than `least`."""
        size = abs(value)
        if len(self._before) >= MIN_STEPS and size > self.least and size > SPIKE * statistics.median(self._before) > 0:
            return True
        self._before.append(size)
        return False


class Dumps:
    """The dumps of a run. Every rank makes one and the same calls; `batch` is rank 0's."""

    def __init__(self, resolved: Resolved, file: Path | None, rank: int) -> None:
        self.resolved, self.rank, self.folder = resolved, rank, resolved.run_dir / "dumps"
        self.command = f"slimebus trainer {file or resolved.base} --replay"
        self._spikes = {"grad_norm": SpikeDetector(), "loss": SpikeDetector(least=LEAST_LOSS)}
        self._left = MAX_DUMPS - len(list(self.folder.glob("step_*")))  # counted by each rank alike

    def reason(self, metrics: dict[str, float]) -> str:
        """Why a step with these metrics is dumped; empty: it is not."""
        if metrics.get("nonfinite"):
            return "nonfinite"
        if not metrics.get("updated"):
            return ""
        spikes = [name for name, detector in self._spikes.items() if name in metrics and detector.is_spike(metrics[name])]
        return f"spike-{spikes[0]}" if spikes else ""

    def write(self, reason: str, step: int, batch: StepBatch | None, metrics: dict[str, float], random: dict[str, torch.Tensor]) -> None:
        """Dump a step, while fewer than MAX_DUMPS are there; every rank calls it. One that cannot be written is logged."""
        self._left -= 1
        if self._left < 0:
            if batch is not None:
                log.warning("step %d (%s) is not dumped: %s has %d dumps; remove some to get more", step, reason, self.folder, MAX_DUMPS)
            return
        target = self.folder / f"step_{step:08d}-{reason}"
        try:
            target.mkdir(parents=True, exist_ok=True)
            write_arrays({name: state.numpy() for name, state in random.items()}, random_file(target, self.rank))
            if batch is not None:
                write_batch(target, batch)
                self._write_about(target, reason, step, metrics)
                log.warning("step %d (%s) is dumped; to train it again: %s %s", step, reason, self.command, target)
        except (OSError, SlimebusError) as bad:
            log.error("step %d (%s) cannot be dumped: %s", step, reason, bad)

    def _write_about(self, target: Path, reason: str, step: int, metrics: dict[str, float]) -> None:
        about = {"reason": reason, "step": step, "checkpoint": saved_step(self.resolved.run_dir / "checkpoints")}
        values = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        (target / "dump.json").write_bytes(msgspec.json.encode(about | {"metrics": values, "config": self.resolved.config}))


def write_batch(target: Path, batch: StepBatch) -> None:
    """A batch in the files of an export. Raises OSError, also where it has more than MAX_BYTES."""
    write_groups(target, ((group.id, group.samples) for group in batch.groups), max_bytes=MAX_BYTES)
    (target / BATCHES_FILE).write_bytes(msgspec.json.encode({"step": batch.step, **batch.record()}) + b"\n")


class SampleDump:
    """At most `limit` samples under run_dir, of the newest steps, whole groups only."""

    def __init__(self, run_dir: Path, limit: int) -> None:
        self.folder, self.limit = run_dir / SAMPLES_FOLDER, limit
        self._counts: dict[int, int] = {}
        for step, place in step_folders(self.folder).items():
            count = limit  # of one that a power cut left unreadable: it is the first to go
            with contextlib.suppress(SlimebusError):
                count = sum(group.num_samples for group in read_groups(place))
            self._counts[step] = count

    def add(self, batch: StepBatch) -> None:
        """Keep a step that was trained, in place of the oldest ones, and of what another timeline had from this step on.

        Of a batch of more than `limit` samples the first groups are kept. What cannot be written is logged.
        """
        kept, count = [], 0
        for group in batch.groups:
            if count + len(group.samples) <= self.limit:
                kept.append(group)
                count += len(group.samples)
        if not kept:
            return
        try:
            unfinished = self.folder / ".unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write_batch(unfinished, msgspec.structs.replace(batch, groups=kept))
            self._make_room(batch.step, count)
            unfinished.rename(self._step_folder(batch.step))
            self._counts[batch.step] = count
        except (OSError, SlimebusError) as bad:
            log.error("the samples of step %d cannot be kept: %s", batch.step, bad)

    def _make_room(self, step: int, count: int) -> None:
        for old in sorted(self._counts):
            if old >= step or sum(self._counts.values()) + count > self.limit:
                del self._counts[old]
                shutil.rmtree(self._step_folder(old), ignore_errors=True)  # someone may have removed it

    def _step_folder(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

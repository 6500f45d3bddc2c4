"""Train-only from a folder of groups: no broker, no workers, nothing published, nothing saved, the same every time.

DIR/                  what `slimebus buffer export` or a dump (trainer/watch/) wrote: slimebus/client/exported_groups.py
  batches.jsonl       which groups each step had; else RUN_DIR/metrics/batches.jsonl; else groups in order, rollout_batch_size a step
  random_00000.safetensors   of a dump: the random state of each rank before the step
"""

import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from slimebus.bus.errors import DataError, UsageError
from slimebus.bus.samples import Sample
from slimebus.client.exported_groups import BATCHES_FILE, GROUPS_FILE, folders_of, read_groups, read_lines
from slimebus.config import Resolved
from slimebus.telemetry.metrics import MetricsWriter
from slimebus.weights.tensors import hash_bytes, host_bytes
from trainer.batches.batch import TrainingGroup
from trainer.batches.flatten import check_sample, is_failed
from trainer.checkpoint.folder import Progress, complete_checkpoints, step_of
from trainer.session.step_batch import EndOfBatches, StepBatch, lag_of

if TYPE_CHECKING:
    from trainer.model.policy import Policy

log = logging.getLogger("trainer")

OF_THE_RATE = frozenset(f"optimizer.{name}" for name in ("lr", "min_lr", "lr_warmup_iters", "lr_decay_style", "lr_decay_iters"))
"""One of them as a flag of the replay, and the recorded learning rates do not count."""


class BatchRow(msgspec.Struct):
    """A line of batches.jsonl."""

    step: int
    version: int
    groups: list[str]
    learning_rates: tuple[float, ...] = ()


class ReplaySource:
    """The batches of a folder, on rank 0. Raises UsageError or DataError when they cannot be read."""

    def __init__(self, folder: Path, resolved: Resolved, from_step: int = 0) -> None:
        self.folder, self.config = folder, resolved.config
        self.folders = folders_of(folder)
        self.groups = {row.group: (place, row) for place in self.folders for row in read_groups(place)}
        if not self.groups:
            raise DataError(f"{self.folders[0] / GROUPS_FILE}: no group has samples; export those that were trained (--state committed)")
        rows = self._recorded(resolved.run_dir / "metrics") or self._in_order(resolved.run_dir / "metrics")
        end = self.config.rollout.num_rollout
        self.rows = {step: row for step, row in rows.items() if from_step <= step < end}
        if not self.rows:
            has = f"{folder} has the groups of steps {min(rows)} to {max(rows)}"
            raise UsageError(f"--from-step {from_step}: {has}, and rollout.num_rollout is {end}")
        self.first_step, self.num_left_out = min(self.rows), sum(step >= end for step in rows)
        self.has_own_rates = any(name in OF_THE_RATE and place.startswith("--") for name, place in resolved.origin.items())
        self.metrics = resolved.run_dir / "replay"
        rename_existing(self.metrics / "trainer.jsonl")
        self.writer = MetricsWriter(self.metrics, "trainer")
        self._vocab_size, self._base = 0, resolved.base
        self._fields: set[str] = set()

    def _recorded(self, metrics: Path) -> dict[int, BatchRow]:
        """The steps, without a gap, with all their groups here: as the last row of each says."""
        own = [file for folder in self.folders if (file := folder / BATCHES_FILE).exists()]
        files = own or [file for file in [metrics / BATCHES_FILE] if file.exists()]
        if not files:
            return {}
        rows = {row.step: row for file in files for row in read_lines(file, BatchRow)}
        whole = {step for step, row in rows.items() if all(group in self.groups for group in row.groups)}
        first = min(whole, default=None)
        if first is None:
            raise DataError(f"{self.folder}: of no step in {files[0]} are all groups here; export them while the broker has them")
        steps = [first]
        while steps[-1] + 1 in whole:
            steps.append(steps[-1] + 1)
        return {step: rows[step] for step in steps}

    def _in_order(self, metrics: Path) -> dict[int, BatchRow]:
        size, names = self.config.rollout.rollout_batch_size, list(self.groups)
        text = "neither %s nor %s has a %s, which says what each step had: groups are taken as they stand in the folder, %d a step"
        log.warning(text, self.folder, metrics, BATCHES_FILE, size)
        steps = max(1, len(names) // size)
        return {step: BatchRow(step, step, names[step * size : (step + 1) * size]) for step in range(steps)}

    def begin(self, start: Progress, publication: Any, vocab_size: int) -> None:
        """Token ids are below vocab_size."""
        from trainer.objective.build_objective import build_objective

        self._vocab_size, self._fields = vocab_size, build_objective(self.config, self._base).fields
        last, rollout = max(self.rows), self.config.rollout
        steps = f"step {last}" if last == self.first_step else f"steps {self.first_step} to {last}"
        what = f"{steps} of {self.folder}"
        log.info("replays %s, metrics in %s", what, self.metrics)
        if self.num_left_out:
            log.warning("%d later steps are there and not replayed: rollout.num_rollout is %d", self.num_left_out, last + 1)
        if self.has_own_rates:
            log.info("the learning rates are those of the options given, not the recorded ones")
        elif lacking := [
            s
            for s, row in self.rows.items()
            if len(row.learning_rates) != min(rollout.num_steps_per_rollout, len(row.groups)) * rollout.num_passes_per_rollout
        ]:
            text = "no learning rate is recorded of step %d%s for each optimizer step: it is the schedule's, counted from its checkpoint"
            log.warning(text, lacking[0], f" and {len(lacking) - 1} more" if len(lacking) > 1 else "")

    def take_batch(self, step: int, wait_s: float) -> StepBatch:
        """The batch of `step`. Raises EndOfBatches after the last one, DataError when its groups cannot be trained."""
        if step not in self.rows:
            raise EndOfBatches
        row, following = self.rows[step], self.rows.get(step + 1)
        groups = [TrainingGroup(name, self._samples(name)) for name in row.groups]
        lags = [lag_of(sample, row.version) for group in groups for sample in group.samples]
        if not lags:
            raise DataError(f"{self.folder}: step {step} has no sample that can be trained: those of its {len(groups)} groups all failed")
        next_version = row.version if following is None else following.version
        return StepBatch(step, row.version, next_version, groups, lags, learning_rates=() if self.has_own_rates else row.learning_rates)

    def record(self, batch: StepBatch) -> None:
        """It is on record already."""

    def _samples(self, name: str) -> list[Sample]:
        folder, row = self.groups[name]
        samples = row.samples(folder)
        kept = [sample for sample in samples if not is_failed(sample)]
        for i, sample in enumerate(kept):
            check_sample(sample, f"group {name}: sample {i}", self._vocab_size, reads_logprobs=False, fields=self._fields)
        return kept

    def commit(self, step: int, batch: StepBatch, checkpoint: int, metrics: dict[str, float]) -> None:
        """Record the step, with all digits: two replays can be compared."""
        values = metrics | batch.metrics()
        self.writer.write(step, values)
        log.info("step %d: reward %.3f, loss %.6f, gradient norm %.6f", step, values["reward"], values["loss"], values["grad_norm"])

    def finish(self) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Release the file."""
        self.writer.close()


class NoPublication:
    """Nobody pulls."""

    lineage = "replay"

    def begin(self, version: int) -> None:
        """Nothing is served."""

    def publish(self, version: int) -> None:
        """Nor this."""

    def finish(self) -> None:
        """Nobody is waited for."""

    def close(self) -> None:
        """Nothing is open."""


class ReplayStart:
    """In place of the checkpoints of a run: a replay begins with the newest of them before its first step, and saves none."""

    lineage, age_s = "", 0.0

    def __init__(self, resolved: Resolved, folder: Path, source: ReplaySource | None) -> None:
        self.directory, self.folder, self.source = resolved.run_dir / "checkpoints", folder, source
        self._next_step = 0

    def resume(self, policy: "Policy") -> Progress:
        """The weights that the first step is trained with: of the newest checkpoint before it, or the initial model's."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        from trainer.checkpoint.load import load_step
        from trainer.checkpoint.trained_state import restore_random_state
        from trainer.model import parallel

        first = parallel.broadcast_value(self.source.first_step if self.source else None, int)
        held = [step for step in map(step_of, complete_checkpoints(self.directory)) if step <= first]
        newest = parallel.broadcast_value(max(held, default=-1), int)
        found = load_step(self.directory, policy, newest) if newest >= 0 else Progress(0, 0, 0)
        random = random_file(self.folder, parallel.rank())
        if random.exists():
            try:
                restore_random_state(load_file(random))
            except (SafetensorError, KeyError) as bad:
                raise DataError(f"{random} is damaged: {bad}; remove it to replay with the random state of the seed") from None
        if found.step != first:
            source = f"the checkpoint of step {newest}" if newest >= 0 else "the initial model"
            log.warning("step %d is replayed with the weights of %s: the batches between are not here", first, source)
        return Progress(first, self._version(first), found.num_updates, found.lineage)

    def _version(self, step: int) -> int:
        return 0 if self.source is None else self.source.rows[step].version

    def check_newest(self) -> None:
        """Others may save meanwhile."""

    def save_if_due(self, policy: "Policy", next_step: int, version: int) -> int:
        """Nothing is saved."""
        self._next_step = next_step
        return next_step

    def save_and_stop(self, policy: "Policy", next_step: int, version: int) -> None:
        """The batches end here."""
        self.close(policy)

    def close(self, policy: "Policy") -> None:
        """Name the weights that came out: two replays of the same batches print the same."""
        hashes = {name: hash_bytes(host_bytes(tensor)) for name, tensor in policy.export.tensors()}
        text = "".join(f"{name} {hashed}\n" for name, hashed in sorted(hashes.items()))
        log.info("replayed to step %d; BLAKE3 of the weights: %s", self._next_step - 1, hash_bytes(text.encode()))


def rename_existing(file: Path) -> None:
    """Move it, if it is there, to `NAME-1.jsonl` beside it, or the first number that is free."""
    if file.exists():
        file.rename(next(path for n in itertools.count(1) if not (path := file.with_stem(f"{file.stem}-{n}")).exists()))


def random_file(folder: Path, rank: int) -> Path:
    """Of a dump: the random state of a rank before the step."""
    return folder / f"random_{rank:05d}.safetensors"

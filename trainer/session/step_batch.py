"""The batch of one training step, what every rank must know of it before it is trained, and where batches come from: the bus
(trainer/session/broker_session.py), a folder (trainer/session/replay.py), or a test.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import NO_VERSION, BatchReply
from slimebus.bus.sample_table import oldest_version
from slimebus.bus.samples import Sample
from trainer.batches.batch import TrainingGroup
from trainer.checkpoint.folder import Progress

ZERO_VARIANCE = "zero_variance"
NUM_QUANTILES = 21
WARN_IDLE = 5


class StepPlan(msgspec.Struct, frozen=True):
    """How a batch is trained: in so many optimizer steps a pass, at these learning rates over all passes, and whether a version is
    published after it. stops: not at all, the run stops."""

    num_steps: int = 0
    learning_rates: tuple[float, ...] = ()
    publishes: bool = False
    stops: bool = False


NOT_YET = StepPlan()
"""Rank 0 still waits for the batch; it says so often enough that no other rank's broadcast times out."""


def lag_of(sample: Sample, version: int) -> int:
    """How many versions before `version` the oldest of its trained tokens was made; 0 where no policy made them."""
    oldest = oldest_version(sample.versions, sample.loss_mask)
    return 0 if oldest == NO_VERSION else version - oldest


def checked_lag(sample: Sample, batch: BatchReply) -> int:
    """Staleness of one sample, recomputed from its tokens: the bound of its batch holds without trust in the broker."""
    lag = lag_of(sample, batch.version)
    bound = math.inf if batch.max_staleness is None else batch.max_staleness
    if not 0 <= lag <= bound:
        what = f"a sample of version {batch.version - lag} in training of version {batch.version}"
        raise SlimebusError(f"{what}; max_staleness is {bound:g}; nothing was trained on it", code="too_stale")
    return lag


class StepBatch(msgspec.Struct):
    """A step's groups; version is the one being trained, next_version that of the step after, lags the staleness of each sample.

    num_rejected: groups that were handed back before this batch was whole. learning_rates: of its optimizer steps, by the schedule of the
    run that it is (or, in a replay, was) trained in.
    """

    step: int
    version: int
    next_version: int
    groups: list[TrainingGroup]
    lags: list[int]
    num_rejected: int = 0
    learning_rates: tuple[float, ...] = ()

    @property
    def samples(self) -> list[Sample]:
        """Those of all groups."""
        return [sample for group in self.groups for sample in group.samples]

    def plan(self, schedule: Sequence[float], num_passes: int = 1) -> StepPlan:
        """How this batch is trained: in one optimizer step for each learning rate of the schedule, divided among the passes, and in fewer
        where it has fewer groups. Recorded rates replace the schedule where they are of as many steps."""
        num_steps = min(len(schedule) // num_passes, len(self.groups))
        if len(self.learning_rates) != num_steps * num_passes:
            self.learning_rates = tuple(schedule[: num_steps * num_passes])
        return StepPlan(num_steps, self.learning_rates, publishes=self.next_version > self.version)

    def record(self) -> dict[str, Any]:
        """What this step is given: its groups by id, how many trained tokens have which staleness (demonstrations have none), and
        NUM_QUANTILES evenly spaced quantiles of the trained tokens of a sample."""
        tokens: Counter[int] = Counter()
        for sample in self.samples:
            versions, lengths = np.array(sample.versions, np.int64).reshape(-1, 2).T
            made_by = np.repeat(versions, lengths)[sample.loss_mask > 0]
            tokens.update(np.where(made_by == NO_VERSION, 0, self.version - made_by).tolist())
        lags = {str(lag): count for lag, count in sorted(tokens.items())}
        made = [int((sample.loss_mask > 0).sum()) for sample in self.samples]
        quantiles = np.quantile(made, np.linspace(0, 1, NUM_QUANTILES)).round(1).tolist() if made else []
        return {
            "version": self.version,
            "groups": [group.id for group in self.groups],
            "lag_tokens": lags,
            "lengths": quantiles,
            "learning_rates": self.learning_rates,
        }

    def without_gradient(self) -> dict[str, str]:
        """Groups that trained nothing, by the reason: the advantages of all their tokens were zero. Known once the batch is trained."""
        return {group.id: ZERO_VARIANCE for group in self.groups if not group.has_gradient}

    def metrics(self) -> dict[str, float]:
        """Mean reward and staleness of the samples."""
        return {
            "reward": float(np.mean([sample.reward or 0.0 for sample in self.samples])),
            "lag_mean": float(np.mean(self.lags)),
            "lag_max": float(max(self.lags)),
            "num_samples": float(len(self.samples)),
            "num_tokens": float(sum(len(sample.tokens) for sample in self.samples)),
            "rejected_groups": float(self.num_rejected),
        }


class IdleSteps:
    """Steps in a row in which no group had a gradient: nothing was trained."""

    def __init__(self) -> None:
        self.num = 0

    def warning(self, batch: StepBatch) -> str:
        """Of a step that is trained: what to log at the fifth one in a row, and whenever they are twice as many; else nothing."""
        self.num = 0 if any(group.has_gradient for group in batch.groups) else self.num + 1
        if self.num % WARN_IDLE or (self.num // WARN_IDLE).bit_count() != 1:
            return ""
        rewards = {sample.reward for sample in batch.samples}
        what = f"all rewards are {rewards.pop()}" if len(rewards) == 1 else "the samples of each group have equal rewards"
        return f"nothing was trained in the last {self.num} steps: {what}; `slimebus try` shows what the reward sees"


class EndOfBatches(Exception):
    """There is no batch of this step and there will be none: the loop stops before it."""


class BatchSource(Protocol):
    """What the loop asks of it, on rank 0 alone. Steps are taken in order, from where it began; each is committed when trained."""

    def begin(self, start: Progress, publication: Any, vocab_size: int) -> None:
        """Training begins where `start` ends; the versions are those of `publication`. Token ids are below vocab_size."""

    def take_batch(self, step: int, wait_s: float) -> StepBatch | None:
        """The batch of `step`, or None when it is not here after wait_s seconds. Raises EndOfBatches."""

    def record(self, batch: StepBatch) -> None:
        """It is trained next, and as it was planned."""

    def commit(self, step: int, batch: StepBatch, checkpoint: int, metrics: dict[str, float]) -> None:
        """`step` is trained. checkpoint: the first step with a batch that may be needed again."""

    def finish(self) -> None:
        """All steps are trained."""

"""A model that learns: what the policy and the critic have in common, and what a checkpoint holds of either."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from slimebus.bus.errors import SlimebusError
from slimebus.config import RunConfig
from trainer.arguments.rank_settings import shared_settings
from trainer.batches.batch import Batch, Column, TrainingGroup, batch_of_bytes, batch_to_bytes, columns_of_bytes, columns_to_bytes
from trainer.compat import cpu_compat
from trainer.model import parallel, update
from trainer.model.gpt import Model, Role, build_model
from trainer.model.optimizer import GradientCosine, build_optimizer, learning_rate
from trainer.model.reference import Reference
from trainer.objective.build_objective import build_objective
from trainer.objective.objective import Objective

MAX_NONFINITE = 8
"""Optimizer steps in a row that are not finite and end the run: skipping more of them would train nothing."""


class Learner:
    """Every rank builds one and makes the same calls; rank 0 gives the groups, the others None."""

    role: Role = "policy"
    reference: Reference | None = None
    cosine: GradientCosine | None = None

    @classmethod
    def build(cls, config: RunConfig, model_dir: str, base: Path | None = None) -> Self:
        """Join the other ranks, build the model with the weights of `model_dir`, and the optimizer. base: the folder of the run.yaml, for
        algorithms by path. `close` undoes it all.

        Raises ConfigError or DataError with one line when the config, the layout or the model directory do not fit.
        """
        objective = build_objective(config, base)
        config = cls.checked(config, objective)
        with cpu_compat.library_warnings_ignored():
            parallel.start(config, shared_settings(config, base, Path(model_dir)))
            try:
                return cls(config, build_model(config, model_dir, role=cls.role), objective)
            except BaseException:
                parallel.stop()
                raise

    @staticmethod
    def checked(config: RunConfig, objective: Objective) -> RunConfig:
        """The config that it is built with. Raises ConfigError for one that it cannot have."""
        return config

    def __init__(self, config: RunConfig, model: Model, objective: Objective) -> None:
        self.config, self.model, self.objective = config, model, objective
        self.optimizer = build_optimizer(config, model)
        self.num_updates = 0
        """Steps of the learning-rate schedule done so far."""
        self.num_nonfinite = 0
        """Optimizer steps in a row with a loss or gradient that was not finite; they were not applied."""

    def close(self) -> None:
        """Leave the other ranks."""
        parallel.stop()

    def learning_rates(self, num_steps: int) -> list[float]:
        """Of the next optimizer steps, by the schedule."""
        last = self.config.rollout.num_rollout * self.config.rollout.num_updates_per_rollout
        return [learning_rate(self.config.optimizer, self.num_updates + i, num_updates=last) for i in range(num_steps)]

    def _gradient(self, part: Batch, loss_of_rows: Callable[[int, int], Any]) -> dict[str, float]:
        return update.compute_gradient(self.model, self.optimizer, part, self.config.trainer.max_tokens_per_gpu, loss_of_rows)

    def _forward(self, batch: Batch) -> np.ndarray:
        """Logprobs or values, [N]."""
        return update.forward_pass(self.model, batch, self.config.trainer.max_tokens_per_gpu)

    def _count_update(self, metrics: dict[str, float]) -> None:
        """An optimizer step was made, or skipped. Raises SlimebusError `nonfinite` when too many were skipped."""
        self.num_updates += 1
        self.num_nonfinite = self.num_nonfinite + 1 if metrics["nonfinite"] else 0 if metrics["updated"] else self.num_nonfinite
        limit = 1 if self.config.trainer.on_nonfinite == "stop" else MAX_NONFINITE
        if self.num_nonfinite >= limit:
            raise SlimebusError(
                f"the loss or gradient of {self.num_nonfinite} optimizer steps in a row was not finite; none of them was applied, and the "
                "newest checkpoint is from before. Look at the samples and rewards, or lower optimizer.lr",
                code="nonfinite",
            )

    def _broadcast_batch(self, groups: Sequence[TrainingGroup] | None, version: int | None) -> Batch:
        """The batch of rank 0's groups, on every rank."""
        batch = None if groups is None else self.objective.batch_of(groups, version)
        if batch is not None and not parallel.has_others():
            return batch
        return batch_of_bytes(parallel.broadcast_bytes(None if batch is None else batch_to_bytes(batch)))

    def _of_rank_0(self, compute: Callable[[], dict[str, Column]]) -> dict[str, Column]:
        """The columns that rank 0 computes, on every rank: a plug-in need not give the same on all of them."""
        if not parallel.has_others():
            return compute()
        return columns_of_bytes(parallel.broadcast_bytes(columns_to_bytes(compute()) if parallel.is_main_rank() else None))

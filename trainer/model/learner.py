"""A model that learns: what the policy and the critic have in common, and what a checkpoint holds of either."""

from collections.abc import Callable, Sequence
from typing import Any

from slimebus.bus.errors import SlimebusError
from slimebus.cli.config import RunConfig
from trainer.batches.batch import Batch, Column, Group, batch_of_bytes, batch_to_bytes, columns_of_bytes, columns_to_bytes
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.reference import Reference
from trainer.objective.objective import Objective

MAX_NONFINITE = 8
"""Optimizer steps in a row that are not finite and end the run: skipping more of them would train nothing."""


class Learner:
    """Every rank builds one and makes the same calls; rank 0 gives the groups, the others None."""

    reference: Reference | None = None

    def __init__(self, config: RunConfig, model: Model, optimizer: Any, objective: Objective) -> None:
        self.config, self.model, self.optimizer, self.objective = config, model, optimizer, objective
        self.num_updates = 0
        """Steps of the learning-rate schedule done so far."""
        self.num_nonfinite = 0
        """Optimizer steps in a row whose loss or gradient was not finite; they were not applied."""

    def close(self) -> None:
        """Leave the other ranks."""
        parallel.stop()

    def _count_nonfinite(self, metrics: dict[str, float]) -> None:
        self.num_nonfinite = self.num_nonfinite + 1 if metrics["nonfinite"] else 0 if metrics["updated"] else self.num_nonfinite
        limit = 1 if self.config.trainer.on_nonfinite == "stop" else MAX_NONFINITE
        if self.num_nonfinite >= limit:
            raise SlimebusError(
                f"the loss or gradient of {self.num_nonfinite} optimizer steps in a row was not finite; none of them was applied, and the "
                "newest checkpoint is from before. Look at the samples and rewards, or lower optimizer.lr",
                code="nonfinite",
            )

    def _shared(self, groups: Sequence[Group] | None, version: int | None) -> Batch:
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

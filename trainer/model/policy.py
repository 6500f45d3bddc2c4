"""The model being trained, as the loop sees it: train, log-probabilities, weights by Hugging Face name."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from slimebus.bus.errors import SlimebusError
from slimebus.cli.config import RunConfig
from trainer.algorithms import needs_old_pass, needs_reference
from trainer.batches.batch import Group, TokenBatch, flatten, share
from trainer.compat import cpu_compat
from trainer.model import parallel, update
from trainer.model.gpt import Model, build_model
from trainer.model.hf_export import HfExport
from trainer.model.hf_folder import write_folder
from trainer.model.optimizer import build_optimizer, learning_rate, set_learning_rate

MAX_NONFINITE = 8
"""Optimizer steps in a row that are not finite and end the run: skipping more of them would train nothing."""


class Policy:
    """Every rank builds one and makes the same calls; rank 0 gives the batch, the others None."""

    def __init__(self, config: RunConfig, model: Model, optimizer: Any, reference: Model | None) -> None:
        self.config, self.model, self.optimizer, self.reference = config, model, optimizer, reference
        self.num_updates = 0
        """Steps of the learning-rate schedule done so far."""
        self.num_nonfinite = 0
        """Optimizer steps in a row whose loss or gradient was not finite; they were not applied."""

    @classmethod
    def build(cls, config: RunConfig, model_dir: str) -> "Policy":
        """Join the other ranks, build the model with the weights of `model_dir`, the optimizer, and for a KL term the frozen reference.

        The reference has those weights also in a run that is resumed. `close` undoes it all.

        Raises ConfigError or DataError with one line when the config, the layout or the model directory do not fit.
        """
        with cpu_compat.library_warnings_ignored():
            parallel.start(config)
            try:
                model = build_model(config, model_dir)
                reference = build_model(config, model_dir, is_trained=False) if needs_reference(config.algorithm) else None
                return cls(config, model, build_optimizer(config, model), reference)
            except BaseException:
                parallel.stop()
                raise

    def train(self, groups: Sequence[Group] | None, *, num_steps: int = 1) -> dict[str, float]:
        """Train on a batch of groups, in `num_steps` optimizer steps on parts of almost equal numbers of groups; metrics on every rank
        (docs/algorithms.md lists them).

        Raises SlimebusError `nonfinite` when the loss or gradient is not finite and `on_nonfinite` says stop, or too often.
        """
        batch = self._shared(groups)
        if self.reference is not None:
            batch = replace(batch, reference_logprobs=self._logprobs(self.reference, batch))
        if num_steps > 1 and needs_old_pass(self.config.algorithm):
            batch = replace(batch, old_logprobs=self._logprobs(self.model, batch))
        edges = [batch.num_groups * i // num_steps for i in range(num_steps + 1)]
        made = [self._train_part(batch, range(*part), is_only_step=num_steps == 1) for part in pairwise(edges)]
        return update.merged_metrics(made) | {"lr": made[-1]["lr"]}

    def _train_part(self, batch: TokenBatch, groups: range, *, is_only_step: bool) -> dict[str, float]:
        num_rollout, num_steps = self.config.rollout.num_rollout, self.config.rollout.num_steps_per_rollout
        lr = learning_rate(self.config.optimizer, self.num_updates, num_updates=num_rollout * num_steps)
        set_learning_rate(self.optimizer, lr)
        metrics = update.train_step(self.model, self.optimizer, batch, groups, self.config, is_only_step=is_only_step)
        self.num_updates += 1
        self._count_nonfinite(metrics)
        return metrics | {"lr": lr}

    def _count_nonfinite(self, metrics: dict[str, float]) -> None:
        self.num_nonfinite = self.num_nonfinite + 1 if metrics["nonfinite"] else 0 if metrics["updated"] else self.num_nonfinite
        limit = 1 if self.config.trainer.on_nonfinite == "stop" else MAX_NONFINITE
        if self.num_nonfinite >= limit:
            raise SlimebusError(
                f"the loss or gradient of {self.num_nonfinite} optimizer steps in a row was not finite; none of them was applied, and the "
                "newest checkpoint is from before. Look at the samples and rewards, or lower optimizer.lr",
                code="nonfinite",
            )

    def logprobs(self, groups: Sequence[Group] | None) -> list[np.ndarray]:
        """Log-probability of every token under the current weights, [T] f32 for each sample in batch order; 0 at each first token."""
        batch = self._shared(groups)
        return np.split(self._logprobs(self.model, batch), batch.ends[:-1])

    @cached_property
    def export(self) -> HfExport:
        """The weights by Hugging Face name, whole on the ranks that own them. Every rank makes it and runs its generators to their end."""
        return HfExport(self.model)

    def save_hf(self, folder: str) -> None:
        """Write a directory that transformers reloads with equal weights: safetensors, config and the tokenizer it came with."""
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.export.tensors()}
        if parallel.is_main_rank():
            write_folder(folder, tensors, self.model.folder, self.config.trainer.params_dtype)

    def close(self) -> None:
        """Leave the other ranks."""
        parallel.stop()

    def _logprobs(self, model: Model, batch: TokenBatch) -> np.ndarray:
        return update.compute_logprobs(model, batch, self.config.trainer.max_tokens_per_gpu)

    def _shared(self, groups: Sequence[Group] | None) -> TokenBatch:
        """The batch with its advantages, on every rank."""
        return share(None if groups is None else flatten(groups, self.config.algorithm))

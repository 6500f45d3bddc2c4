"""The model being trained, as the loop sees it: train, log-probabilities, weights by Hugging Face name."""

import math
from collections import deque
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from slimebus.config import RunConfig
from trainer.batches.batch import Batch, TrainingGroup
from trainer.hf.hf_folder import SHARD_BYTES, write_folder
from trainer.model import parallel, update
from trainer.model.gpt import Model
from trainer.model.hf_export import HfExport
from trainer.model.learner import Learner
from trainer.model.optimizer import GradientCosine, gather_weights
from trainer.model.reference import Reference
from trainer.objective.lag_metrics import thin_samples
from trainer.objective.objective import Objective


class Policy(Learner):
    """The policy. Every rank builds one and makes the same calls; rank 0 gives the batch, the others None."""

    def __init__(self, config: RunConfig, model: Model, objective: Objective) -> None:
        """The reference, for a KL term, has these weights also in a run that is resumed, unless it was refreshed."""
        reference = Reference(model) if objective.needs_pass("reference_logprobs") else None
        super().__init__(config, model, objective)
        self.reference = reference
        self.cosine = GradientCosine() if config.trainer.mismatch_interval else None

    def train(
        self,
        groups: Sequence[TrainingGroup] | None,
        *,
        num_steps: int = 1,
        version: int | None = None,
        learning_rates: Sequence[float] = (),
    ) -> dict[str, float]:
        """Train on a batch of groups, in each pass in `num_steps` optimizer steps on parts of almost equal numbers of groups; metrics on
        every rank (docs/algorithms.md lists them). version: the one being trained; None: the newest of the batch. learning_rates: of each
        optimizer step of all passes; none: those of the schedule.

            share the batch -> forward passes, each a column -> advantages -> for each part: prepare, packed rows, loss, optimizer step

        Each group then knows whether it had a gradient. Raises SlimebusError `nonfinite` when the loss or gradient is not finite and
        `on_nonfinite` says stop, or too often.
        """
        num_passes = self.config.rollout.num_passes_per_rollout
        batch = self._add_logprob_columns(self._broadcast_batch(groups, version), num_steps * num_passes)
        batch = batch.with_columns(self._of_rank_0(lambda: self.objective.advantages(batch)))
        trained, made, new_logprobs = list[np.ndarray](), list[dict[str, float]](), list[np.ndarray]()
        rates = learning_rates or self.learning_rates(num_steps * num_passes)
        for i, (samples, lr) in enumerate(zip(batch.cut_groups(num_steps) * num_passes, rates, strict=True)):
            metrics, kept, logprobs = self._train_part(batch.select(samples), lr, is_first=i == 0)
            if i < num_steps:
                trained.append(samples[kept])
                new_logprobs.append(logprobs)
            made.append(metrics if i < num_steps else {name: metrics[name] for name in metrics.keys() - update.OF_THE_BATCH})
        with_gradient = np.concatenate(trained)
        for i, group in enumerate(groups or ()):
            group.has_gradient = bool(np.isin(i, batch.group_of[with_gradient]))
        gather_weights(self.model)
        lag = self.objective.lag_metrics(thin_samples(batch, with_gradient, np.concatenate(new_logprobs)))
        return update.merged_metrics(made) | {"lr": made[-1]["lr"]} | lag

    def refresh_reference(self, num_steps: int) -> None:
        """Make the model as it is now the reference, if one is held and so many steps of the run are a multiple of its interval."""
        interval = self.config.algorithm.ref_update_interval
        if self.reference is not None and interval and num_steps % interval == 0:
            self.reference.refresh()

    def _add_logprob_columns(self, batch: Batch, num_steps: int) -> Batch:
        """The batch with the forward passes that are needed before its first optimizer step, each made once."""
        objective, columns = self.objective, dict[str, np.ndarray]()
        if self.reference is not None:
            with self.reference.swapped_in():
                columns["reference_logprobs"] = self._forward(batch)
        wanted = {name for name in ("old_logprobs", "current_logprobs") if objective.needs_pass(name)}
        if objective.recomputes_old_logprobs and "old_logprobs" not in objective.fields and (num_steps > 1 or wanted):
            wanted.add("old_logprobs")  # with one step, and nothing that reads them before, they are those of the training pass
        if wanted:
            columns |= dict.fromkeys(wanted, self._forward(batch))
        return batch.with_columns(columns)

    def _train_part(self, part: Batch, lr: float, *, is_first: bool) -> tuple[dict[str, float], np.ndarray, np.ndarray]:
        """One optimizer step on `part`, or none where nothing in it has a gradient; metrics, the samples that have one (indices), and
        new_logprobs of all their tokens. What each token weighs, and all that `prepare` chooses, is of the whole part: samples that are
        left out of the forward pass, as they have no gradient, count in it.
        """
        samples, counts = update.choose_samples(part, self.objective)
        metrics, logprobs = {"lr": lr} | update.NO_STEP, np.zeros(0, np.float32)
        if len(samples):
            if not is_first and self.objective.needs_pass("current_logprobs"):
                part = part.with_columns({"current_logprobs": self._forward(part)})
            part = part.with_columns(self._of_rank_0(lambda: self.objective.prepare(part)))
            metrics, logprobs = self._optimizer_step(part.select(samples), lr)
        self._count_update(metrics)
        return counts | metrics, samples, logprobs

    def _optimizer_step(self, part: Batch, lr: float) -> tuple[dict[str, float], np.ndarray]:
        """One optimizer step at this learning rate times the plug-ins' factors; metrics and new_logprobs, 0 where the mask is 0."""
        objective, values = self.objective, update.TokenValues(part.num_tokens)
        measures = self._gradient(part, lambda num_tokens, num_rows: update.loss_of_row(part, num_tokens, num_rows, objective, values))
        new_logprobs = values.of_all_ranks()
        objective.check_weights(measures)
        if objective.changes_learning_rate and math.isfinite(measures["loss"]):
            lr *= parallel.broadcast_value(objective.learning_rate_factor(part, new_logprobs) if parallel.is_main_rank() else None, float)
        return update.apply_gradient(self.optimizer, measures, lr, part.num_samples, self.cosine), new_logprobs

    def logprobs(self, groups: Sequence[TrainingGroup] | None) -> list[np.ndarray]:
        """Log-probability of every token under the current weights, [T] f32 for each sample in batch order; 0 at each first token."""
        batch = self._broadcast_batch(groups, None)
        return np.split(self._forward(batch), batch.ends[:-1])

    @cached_property
    def export(self) -> HfExport:
        """The weights by Hugging Face name, whole on the ranks that own them. Every rank makes it and runs its generators to their end."""
        return HfExport(self.model)

    def save_hf(self, folder: str) -> None:
        """Write a directory that transformers reloads with equal weights: safetensors, config and the tokenizer it came with."""
        tensors = self.export.tensors()
        if parallel.is_main_rank():
            dtype = str(self.model.config.params_dtype).removeprefix("torch.")
            write_folder(folder, list(self.export.owned.values()), tensors, source=self.model.folder, dtype=dtype, shard_bytes=SHARD_BYTES)
        else:
            deque(tensors, maxlen=0)

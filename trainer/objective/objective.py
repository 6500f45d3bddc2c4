"""What a run minimises: one algorithm, its corrections, the KL and entropy terms, and the forward passes that they need."""

import contextlib
import logging
import math
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from slimebus.bus.errors import DataError, HookError, SlimebusError
from slimebus.config import RunConfig
from slimebus.hooks import hooks
from trainer.batches.batch import Batch, Column, TrainingGroup
from trainer.batches.flatten import COLUMNS, advantage_problems, flatten
from trainer.objective.aggregation import token_weights
from trainer.objective.kl import kl_term
from trainer.objective.lag_metrics import metrics_by_lag
from trainer.objective.plugin import Algorithm, Correction, Plugin, TokenLoss
from trainer.objective.row import Row

log = logging.getLogger("trainer")

PASSES = ("reference_logprobs", "old_logprobs", "current_logprobs")
"""Columns that are forward passes of the trainer: of the frozen reference; of the weights before the batch's first optimizer step; of the
weights just before each optimizer step."""
METRICS = {
    *("loss", "grad_norm", "lr", "updated", "nonfinite", "entropy", "kl_loss", "approx_kl", "logprob_mismatch_mean"),
    *("logprob_mismatch_max", "grad_cosine", "samples", "samples_trained", "tokens", "tokens_trained", "zero_variance_groups"),
    *("tokens_per_s", "mfu", "reward", "lag_mean", "lag_max", "num_samples", "num_tokens", "rejected_groups"),
    *("wait_s", "train_s", "publish_s", "save_s", "checkpoint_age_s", "elapsed_s"),
}
"""Of the trainer itself: no measure of a plug-in may have one of these names, nor begin with one of METRIC_FOLDERS."""
METRIC_FOLDERS = ("lag/", "mismatch/", "weights_", "wrong_weight/")


MOST_CLIPPED = 0.3
"""Share of gradients of tokens that may be clipped away at lag 0, where the sampler differs by its engine alone, before it is warned of."""


class Objective:
    """The chosen plug-ins of a run, as the trainer uses them."""

    def __init__(self, config: RunConfig, algorithm: Algorithm, corrections: Sequence[Correction]) -> None:
        self.config, self.settings = config, config.algorithm
        self.algorithm, self.corrections = algorithm, list(corrections)
        self.plugins: list[Plugin] = [algorithm, *corrections]
        self.aggregation = config.algorithm.loss_aggregation or algorithm.aggregation
        self._has_warned = False

    # --- what is needed ---

    @property
    def needs(self) -> set[str]:
        """Columns that must be there before advantages are computed."""
        needs = set[str]().union(*(plugin.needs() for plugin in self.plugins))
        if self.settings.kl_loss_coef or self.settings.kl_coef:
            needs.add("reference_logprobs")
        if self.settings.kl_coef and not self.settings.use_rollout_logprobs:
            needs.add("old_logprobs")
        return needs

    @property
    def fields(self) -> set[str]:
        """Fields that each sample must bring: what is needed and no pass of the trainer's, or a pass that a consumer makes instead."""
        required = self.config.broker.required_fields
        needs = self.needs | ({"old_logprobs"} & set(required) if self.recomputes_old_logprobs else set())
        return {name for name in needs if name not in COLUMNS and (name not in PASSES or name in required)}

    @property
    def row_fields(self) -> frozenset[str]:
        """Fields of any number of rows that each sample must bring."""
        return frozenset[str]().union(*(plugin.row_fields for plugin in self.plugins))

    def needs_pass(self, name: str) -> bool:
        """Whether the trainer makes this forward pass for advantages, `prepare` or a term of the loss."""
        return name in self.needs - self.fields

    @property
    def recomputes_old_logprobs(self) -> bool:
        """Whether old_logprobs are the trainer's own, from before the first optimizer step: with several steps that is a forward pass."""
        is_provided = any(correction.provides_old_logprobs for correction in self.corrections)
        return self.algorithm.compares_with == "old" and not self.settings.use_rollout_logprobs and not is_provided

    @property
    def old_is_of_the_training_pass(self) -> bool:
        """Whether old_logprobs are those of the only optimizer step's own pass, so that the ratio is 1."""
        is_only = self.config.rollout.num_updates_per_rollout == 1
        return is_only and self.recomputes_old_logprobs and "old_logprobs" not in self.fields

    @property
    def trains_without_advantage(self) -> bool:
        """Whether a sample of advantage 0 still has a gradient."""
        a = self.algorithm
        return bool(a.is_supervised or a.trains_without_advantage or self.settings.kl_loss_coef or self.settings.entropy_coef)

    def old_column(self, columns: Batch) -> str | None:
        """The column of old_logprobs; None where they are those of the training pass itself."""
        if self.settings.use_rollout_logprobs:
            return None if any(correction.is_importance_weight for correction in self.corrections) else "rollout_logprobs"
        return "old_logprobs" if "old_logprobs" in columns else None

    # --- what the host computes, on rank 0 ---

    def batch_of(self, groups: Sequence[TrainingGroup], version: int | None) -> Batch:
        """The batch of these groups. Raises DataError where some samples alone bring advantages."""
        for problem in advantage_problems(groups).values():
            raise DataError(problem)
        passes, needed = set(PASSES) - self.fields, self.fields | {"advantages"}
        is_supervised, row_fields = self.algorithm.is_supervised, self.row_fields
        return flatten(groups, version=version, is_supervised=is_supervised, reserved=passes, needed=needed, row_fields=row_fields)

    def advantages(self, batch: Batch) -> dict[str, Column]:
        """The column `advantages`, of each token: the samples' own, else the algorithm's. Raises DataError for one of a wrong shape."""
        seen = ReadColumns(batch.columns)
        with errors_of(self.algorithm):
            given = batch.per_token("advantages") if "advantages" in batch else self.algorithm.advantages(replace(batch, columns=seen))
            values = np.asarray(given, np.float32)
        if self.settings.kl_coef and "reference_logprobs" not in seen.names:
            raise HookError(
                f"{named(self.algorithm)}: algorithm.kl_coef is {self.settings.kl_coef:g}, but its advantages do not read "
                "reference_logprobs, so it has no effect; take rewards_with_kl (trainer/objective/group_rewards.py) or set kl_loss_coef"
            )
        if values.shape != (batch.num_tokens,):
            raise DataError(f"{named(self.algorithm)}: advantages have shape {list(values.shape)}; expected [{batch.num_tokens}]")
        return {"advantages": Column(np.where(batch["loss_mask"] > 0, values, np.float32(0.0)))}

    def prepare(self, part: Batch) -> dict[str, Column]:
        """What one optimizer step needs besides: what each token weighs, and the columns of the plug-ins."""
        weights = token_weights(part, self.aggregation, self.config.rollout.rollout_max_response_len)
        prepared = part.with_columns({"loss_weight": weights})
        for plugin in self.plugins:
            with errors_of(plugin):
                columns = plugin.prepare(prepared)
                check_new("prepare gave the columns", columns, {*prepared.columns, *PASSES, "new_logprobs"} - {"loss_weight"}, plugin)
                prepared = prepared.with_columns(columns)
        return {name: column for name, column in prepared.columns.items() if part.columns.get(name) is not column}

    @property
    def changes_learning_rate(self) -> bool:
        """Whether a plug-in has a factor of its own."""
        return any(type(plugin).learning_rate_factor is not Plugin.learning_rate_factor for plugin in self.plugins)

    def learning_rate_factor(self, part: Batch, new_logprobs: np.ndarray) -> float:
        """The product of the plug-ins' factors. part: as prepared; new_logprobs: [N] of the training pass. Raises HookError for one that
        is not finite, or negative."""
        seen, product = part.with_columns({"new_logprobs": new_logprobs}), 1.0
        for plugin in self.plugins:
            with errors_of(plugin):
                factor = float(plugin.learning_rate_factor(seen))
            if not 0 <= factor < math.inf:
                raise HookError(f"{named(plugin)}: learning_rate_factor is {factor}; expected a finite number, 0 or above")
            product *= factor
        return product

    # --- the loss ---

    def loss(self, row: Row) -> TokenLoss:
        """Algorithm's loss * the corrections' weights + kl_loss_coef * KL(new || reference) - entropy_coef * entropy, per token."""
        for correction in self.corrections:
            if correction.provides_old_logprobs:
                with errors_of(correction):
                    row.old_logprobs = one_value_per_token(correction.old_logprobs(row), row, correction).detach()
        with errors_of(self.algorithm):
            outcome = self.algorithm.loss(row)
        loss, measures = one_value_per_token(outcome.loss, row, self.algorithm), dict[str, torch.Tensor]()
        if row.new_logprobs.requires_grad and not loss.requires_grad:
            raise HookError(f"{named(self.algorithm)}: the loss has no gradient; compute it from row.new_logprobs without detaching them")
        self._report(measures, outcome.measures, self.algorithm)
        for i, correction in enumerate(self.corrections):
            with errors_of(correction):
                weighed = correction.weight(row)
            weight = one_value_per_token(weighed.weight, row, correction).detach()
            loss = torch.where(weight > 0, loss * weight, 0.0)
            self._report(measures, weighed.measures, correction)
            measures[wrong_weight(i)] = (~(weight >= 0)).float()  # looked at with the metrics: here the host would wait for the device
        if self.settings.kl_loss_coef:
            kind = self.settings.kl_loss_type or "k3"
            divergence = kl_term(kind, row.new_logprobs, row.rollout_logprobs, row["reference_logprobs"])
            loss = loss + self.settings.kl_loss_coef * divergence
            measures["kl_loss"] = divergence.detach()
        if self.settings.entropy_coef:
            loss = loss - self.settings.entropy_coef * row.entropy
        return TokenLoss(loss, measures)

    @staticmethod
    def _report(measures: dict[str, torch.Tensor], of_plugin: Mapping[str, torch.Tensor], plugin: Plugin) -> None:
        taken = {name for name in of_plugin if name.startswith(METRIC_FOLDERS)} | METRICS | measures.keys()
        check_new("it gave the measures", of_plugin, taken, plugin)
        measures |= of_plugin

    def check_weights(self, measures: dict[str, float]) -> None:
        """Take out of the metrics of a step whether the corrections' weights were numbers from 0 on. Raises HookError for one that gave
        others."""
        for i, correction in enumerate(self.corrections):
            if measures.pop(wrong_weight(i)):
                raise HookError(f"{named(correction)}: the weight of a trained token is negative or NaN; expected 0 or above")

    def lag_metrics(self, batch: Batch) -> dict[str, float]:
        """Metrics by lag of what was trained, which has its new_logprobs; none for demonstrations, which no policy sampled."""
        if self.algorithm.is_supervised or not batch.num_samples:
            return {}
        clip, old = self.algorithm.clip, self.old_column(batch)
        if any(correction.provides_old_logprobs for correction in self.corrections):
            old = None  # it is of each row, and no column
        metrics = metrics_by_lag(batch, clip, old)
        share = metrics.get("lag/0/clip_active", 0.0)
        if clip and old == "rollout_logprobs" and share > MOST_CLIPPED and not self._has_warned:
            self._has_warned = True
            text = "at lag 0 the clip to %g - %g took the gradient of %.0f%% of the tokens away: it clips the error of the sampler's engine"
            log.warning(text + "; widen algorithm.settings.eps_clip (docs/algorithms.md)", clip.low, clip.high, 100 * share)
        return metrics


class ReadColumns(dict[str, Column]):
    """Columns of a batch that remember which of them were read."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        super().__init__(columns)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Column:
        self.names.add(name)
        return super().__getitem__(name)


def one_value_per_token(values: torch.Tensor, row: Row, plugin: Plugin) -> torch.Tensor:
    """These values, if they are one of each token of the row: others would be broadcast to a wrong loss. Raises HookError."""
    if values.shape != row.loss_mask.shape:
        raise HookError(f"{named(plugin)}: gave shape {list(values.shape)}; expected {list(row.loss_mask.shape)}, one value of each token")
    return values


def wrong_weight(index: int) -> str:
    """The measure that says whether a correction gave a weight that is none."""
    return f"wrong_weight/{index}_max"


def check_new(what: str, given: Collection[str], taken: Collection[str], plugin: Plugin) -> None:
    """Raise HookError where a plug-in gives names that stand for something else."""
    if clash := sorted(set(given) & set(taken)):
        raise HookError(f"{named(plugin)}: {what} {', '.join(clash)}, which are there already; choose other names")


@contextlib.contextmanager
def errors_of(plugin: Plugin) -> Iterator[None]:
    """Whatever a plug-in raises names it, and the line of its code. Raises HookError."""
    try:
        yield
    except SlimebusError:
        raise
    except Exception as bad:
        frame, line = list(traceback.walk_tb(bad.__traceback__))[-1]
        what = f"{type(bad).__name__}: {hooks.text_of(bad)}"
        if "read-only" in str(bad):
            what += "; the columns of a batch are those of all plug-ins and ranks: copy one, or give a new one, to change it"
        raise HookError(f"{named(plugin)} failed at {frame.f_code.co_filename}:{line}: {what}") from bad


def named(plugin: object) -> str:
    """A plug-in by its class, and the file where that is one of the user's, for errors."""
    module, name = type(plugin).__module__, type(plugin).__name__
    return f"{sys.modules[module].__file__ if module.startswith(hooks.FROM_FILE) else module}:{name}"

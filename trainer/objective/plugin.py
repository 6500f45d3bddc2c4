"""What an algorithm and a correction are: the interface of the plug-ins in trainer/algorithms, trainer/corrections and in your own files.

N tokens of a batch   S its samples   t tokens of a packed row
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import msgspec
import numpy as np
import torch

from slimebus.config import RunConfig
from trainer.batches.batch import Batch, Column
from trainer.objective.row import Row

ComparedPolicy = Literal["old", "rollout"]


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and what to report of it."""

    loss: torch.Tensor
    """[1, t] with gradient; the caller masks, weighs and adds it up."""
    measures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """By metric name, [1, t]: the metric is the mean over trained tokens (where the name ends in `_max` the maximum)."""


@dataclass(frozen=True, slots=True)
class TokenWeight:
    """What a correction multiplies the loss of each token with, and what to report of it."""

    weight: torch.Tensor
    """[1, t], at least 0 and without gradient; 0 takes the token out of the loss, at any value (the denominator stays)."""
    measures: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """As those of a TokenLoss."""


class Clip(NamedTuple):
    """The range that a ratio to row.old_logprobs is clipped to: of each token, or the geometric mean of its sequence's."""

    low: float
    high: float
    level: Literal["token", "geometric"] = "token"


class Plugin:
    """What algorithms and corrections have in common. Made once, on every rank; rank 0 alone is asked for what the host computes."""

    class Settings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
        """Its own settings under `algorithm.settings`, typed, each with a default and a docstring `[unit] meaning`."""

    settings: Settings
    row_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields with rows of their own, such as a reward for each turn: each sample must bring them, with any number of rows."""

    def __init__(self, config: RunConfig, settings: Settings) -> None:
        self.config, self.settings = config, settings

    def needs(self) -> set[str]:
        """Columns that must be in the batch before `advantages` and `prepare` are called: those that the trainer can compute in a forward
        pass (`old_logprobs`, `current_logprobs`, `reference_logprobs`; objective.py:PASSES), and fields of the samples, numbers of each
        token or of the sample, which each of its tokens then has.
        """
        return set()

    def problems(self) -> Iterator[str]:
        """What in the config contradicts it, a sentence each: the field, its value, the remedy."""
        return iter(())

    def prepare(self, part: Batch) -> Mapping[str, Column | np.ndarray]:
        """Columns that `part`, all samples of one optimizer step, gets: [N] arrays, or Columns of another scope.

        Called once for each optimizer step, on rank 0, so that a choice over the whole step depends on no row, rank or layout.
        """
        return {}

    def learning_rate_factor(self, part: Batch) -> float:
        """What the learning rate of this optimizer step is multiplied with. Called on rank 0 when the gradient is there: `part`, of the
        samples that have one, has the columns of `prepare`, and `new_logprobs`, [N] of the training pass. A finite number, 0 or above.
        """
        return 1.0


class Algorithm(Plugin):
    """Advantages and a loss per token. One class in one file."""

    aggregation: ClassVar[str] = "token"
    """How its loss becomes one number where algorithm.loss_aggregation is empty (aggregation.py)."""
    compares_with: ClassVar[ComparedPolicy | None] = None
    """The policy that its loss compares the trained one with: `old` is row.old_logprobs, `rollout` always the sampler's own. None: it
    trains on demonstrations, so rewards, logprobs and temperatures mean nothing."""
    needs_ratio: ClassVar[bool] = False
    """Whether it is another algorithm where its ratio to row.old_logprobs is 1."""
    trains_without_advantage: ClassVar[bool] = False
    """Whether a sample of advantage 0 still has a gradient, and so cannot be left out. Demonstrations always have one."""

    @property
    def is_supervised(self) -> bool:
        """Whether it trains on demonstrations."""
        return self.compares_with is None

    @property
    def clip(self) -> Clip | None:
        """What it clips; None: nothing. Its settings of the clip are those with names that begin with eps_clip."""
        return None

    def advantages(self, batch: Batch) -> np.ndarray:
        """[N] of the whole batch; called once a batch, on rank 0, after all forward passes. Not called where samples bring their own."""
        raise NotImplementedError

    def loss(self, row: Row) -> TokenLoss:
        """The loss of each token of a row, before corrections and the KL and entropy terms."""
        raise NotImplementedError


class PolicyGradient(Algorithm):
    """The base of algorithms that raise the probability of tokens with a positive advantage, from samples of an older policy."""

    compares_with: ClassVar[ComparedPolicy | None] = "old"
    compares_groups: ClassVar[bool] = False
    """Whether its advantages compare the samples of a group."""

    def problems(self) -> Iterator[str]:
        if self.config.rollout.rollout_temperature == 0:
            yield "rollout.rollout_temperature: 0 is greedy: all samples of a group are equal and train nothing; expected a value above 0"
        if self.compares_groups and (size := self.config.rollout.n_samples_per_prompt) < 2:
            yield (
                f"rollout.n_samples_per_prompt: {size}; advantage_estimator {self.config.algorithm.advantage_estimator} compares the "
                "samples of a group, so a group of one has advantage 0 and trains nothing; sample 2 or more"
            )


class Correction(Plugin):
    """A weight per token for samples of another policy; those that are chosen are multiplied. One class in one file."""

    is_importance_weight: ClassVar[bool] = True
    """Whether its weight is p_old / p_rollout; False for a mask. With use_rollout_logprobs, where these are the same, old is then the
    policy being trained itself: the weight is the only correction, the ratio is 1 and nothing is clipped."""
    needs_rollout_as_old: ClassVar[bool | None] = None
    """What algorithm.use_rollout_logprobs must be: true where its weight replaces ratio and clip, false where it is of the trainer's own
    old policy; None: it may be either."""

    def problems(self) -> Iterator[str]:
        name, is_rollout = type(self).__name__.lower(), self.config.algorithm.use_rollout_logprobs
        if self.needs_rollout_as_old is False and is_rollout:
            yield (
                f"algorithm.use_rollout_logprobs: true makes the sampler the old policy, so {name}'s weight p_old / p_rollout would be 1 "
                "everywhere; set it to false"
            )
        if self.needs_rollout_as_old and not is_rollout:
            yield (
                f"algorithm.use_rollout_logprobs: false keeps ratio and clip against the trainer's old policy, but {name}'s weight is of "
                "the policy being trained and replaces them; set it to true"
            )

    @property
    def provides_old_logprobs(self) -> bool:
        """Whether it has `old_logprobs` of its own, so that no forward pass is made for them."""
        return type(self).old_logprobs is not Correction.old_logprobs

    def old_logprobs(self, row: Row) -> torch.Tensor:
        """[1, t], no gradient: what the ratio is taken against instead of row.old_logprobs, if a class has this. Called before the loss."""
        raise NotImplementedError

    def weight(self, row: Row) -> TokenWeight:
        """The weight of each token of a row."""
        raise NotImplementedError

"""Importance ratios of samples of another policy: of tokens, of whole samples, and the numbers that say how far off they are.

d = log(p / p_rollout) of a token   N tokens of a batch   S samples   t tokens of a row
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from trainer.batches.batch import Batch
from trainer.objective.clip import ratio_of
from trainer.objective.row import Row

Level = Literal["token", "sequence", "geometric"]
"""exp(d) of each token; of each sample exp(sum of d over its trained tokens), the true ratio; or exp(mean of d), which is biased."""


def log_weight(row: Row, level: Level = "token") -> torch.Tensor:
    """[1, t], no gradient: log(p_old / p_rollout) at this level, spread over the tokens. With use_rollout_logprobs p_old is the policy
    being trained (plugin.py:Correction.is_importance_weight)."""
    d = (row.old_logprobs - row.rollout_logprobs).detach()
    return d if level == "token" else row.sequence_sum(d) if level == "sequence" else row.sequence_mean(d)


def drift(row: Row) -> torch.Tensor:
    """[1, t], no gradient: log(p_new / p_rollout) of each token, for any p_old."""
    return (row.new_logprobs - row.rollout_logprobs).detach()


def kept_within(row: Row, level: Level, low: float, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight p_old / p_rollout at this level where it lies in [low, high] and 0 elsewhere; where it is 0 (1.0 or 0.0)."""
    ratio = ratio_of(log_weight(row, level))
    is_kept = (ratio >= low) & (ratio <= high)
    return torch.where(is_kept, ratio, 0.0), (~is_kept).float()


def log_ratios(batch: Batch, name: str, level: Level = "token", *, to: str = "rollout_logprobs") -> np.ndarray:
    """log(p / q) with p in column `name` and q in `to`: [N] f64, 0 where the mask is 0, or [S] at the levels of whole samples."""
    with np.errstate(invalid="ignore"):  # what is masked need not be finite
        d = np.where(batch["loss_mask"] > 0, batch[name].astype(np.float64) - batch[to], 0.0)
    if level == "token":
        return d
    sums = batch.sample_sums(d)
    return sums if level == "sequence" else sums / np.maximum(1, batch.sample_sums(np.ones(batch.num_tokens)))


def effective_share(log_weights: np.ndarray) -> float:
    """(sum of w)^2 / (n * sum of w^2) of n unclipped weights: the effective sample size by the number of samples (Kong, 1992), 1 for equal
    weights; 1 for none."""
    if not len(log_weights):
        return 1.0
    weights = np.exp(log_weights - log_weights.max())  # the scale cancels, and exp cannot overflow
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


def bounds_problems(low: float, high: float, setting: str) -> Iterator[str]:
    """The problem of bounds that keep nothing."""
    if low >= high:
        yield f"algorithm.settings.{setting}_low: {low:g} is not below {setting}'s upper bound {high:g}"

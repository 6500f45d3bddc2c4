"""Rewards, returns and advantages of single tokens.

N tokens of the batch   S samples   "next" and "last" are among the trained tokens of a sample: what a tool wrote between takes no time
"""

import numpy as np

from slimebus.config.schema import AlgorithmConfig
from trainer.batches.batch import Batch
from trainer.objective.group_rewards import token_kl


def token_rewards(batch: Batch, algorithm: AlgorithmConfig) -> np.ndarray:
    """[N] f64: -kl_coef KL(old || reference) of each token, and the sample's reward besides at its last; 0 where the mask is 0."""
    rewards = -token_kl(batch, algorithm)
    at, counts = trained_tokens(batch)
    has_tokens = counts > 0
    rewards[at[np.cumsum(counts)[has_tokens] - 1]] += batch["reward"][has_tokens]
    return rewards


def discounted_sums(batch: Batch, values: np.ndarray, discount: float) -> np.ndarray:
    """[N] f64: at each trained token x_t + discount x_next + discount^2 ... to the last token of its sample; 0 where the mask is 0."""
    at, counts = trained_tokens(batch)
    sums, ends = values[at].astype(np.float64), np.cumsum(counts)
    longest_first = np.argsort(-counts, kind="stable")
    for before_last in range(1, int(counts.max(initial=0))):  # all samples at once, from their last tokens on
        here = ends[longest_first[: np.count_nonzero(counts > before_last)]] - 1 - before_last
        sums[here] += discount * sums[here + 1]
    return _spread(batch, at, sums)


def gae(batch: Batch, rewards: np.ndarray, values: np.ndarray, *, gamma: float, lambd: float) -> tuple[np.ndarray, np.ndarray]:
    """Advantages and returns, both [N] f64 and 0 where the mask is 0: A_t = sum of (gamma lambd)^k delta_{t+k}, with
    delta_t = r_t + gamma V_next - V_t and no value after the last token, and A + V. Schulman et al. (2016), eq. 16.
    """
    at, counts = trained_tokens(batch)
    own = values[at].astype(np.float64)
    following = np.append(own[1:], 0.0)
    following[np.cumsum(counts)[counts > 0] - 1] = 0.0
    deltas = _spread(batch, at, rewards[at] + gamma * following - own)
    advantages = discounted_sums(batch, deltas, gamma * lambd)
    return advantages, advantages + _spread(batch, at, own)


def whitened(batch: Batch, values: np.ndarray) -> np.ndarray:
    """(x - mean) / (population deviation + 1e-8) over all trained tokens of the batch, [N] f64; 0 where the mask is 0 or all are equal."""
    at, _ = trained_tokens(batch)
    trained = values[at].astype(np.float64)
    if not len(trained) or np.ptp(trained) == 0:
        return np.zeros(batch.num_tokens)
    return _spread(batch, at, (trained - trained.mean()) / (trained.std() + 1e-8))


def trained_tokens(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Where the trained tokens are, one sample after the other, and how many each sample has, [S]."""
    return np.flatnonzero(batch["loss_mask"] > 0), batch.sample_sums(np.ones(batch.num_tokens)).astype(np.int64)


def _spread(batch: Batch, at: np.ndarray, values: np.ndarray) -> np.ndarray:
    spread = np.zeros(batch.num_tokens)
    spread[at] = values
    return spread

"""Blocks for advantages from rewards: the KL in the reward, and a function of each group's rewards.

N tokens of the batch   S samples   n samples of one group
"""

from collections.abc import Callable

import numpy as np
import torch

from slimebus.config.schema import AlgorithmConfig
from trainer.batches.batch import Batch
from trainer.objective.kl import KL_ESTIMATORS
from trainer.objective.plugin import PolicyGradient

STD_FLOOR = 1e-4  # keeps a group of almost equal rewards finite


def token_kl(batch: Batch, algorithm: AlgorithmConfig) -> np.ndarray:
    """kl_coef * KL(old || reference) of each token, [N] f64; 0 where the mask is 0, and everywhere without a kl_coef."""
    if not algorithm.kl_coef:
        return np.zeros(batch.num_tokens)
    old = batch["rollout_logprobs" if algorithm.use_rollout_logprobs else "old_logprobs"]
    sides = [torch.from_numpy(np.where(batch["loss_mask"] > 0, side, 0.0)) for side in (old, batch.per_token("reference_logprobs"))]
    return algorithm.kl_coef * KL_ESTIMATORS[algorithm.kl_loss_type or "k1"](*sides).numpy()


def rewards_with_kl(batch: Batch, algorithm: AlgorithmConfig) -> np.ndarray:
    """The reward of each sample's trajectory, [S] f64, less kl_coef times the KL of all its tokens."""
    if not algorithm.kl_coef:
        return batch["reward"]
    return batch["reward"] - batch.trajectory_sums(batch.sample_sums(token_kl(batch, algorithm)))


def trajectory_weights(batch: Batch) -> np.ndarray:
    """[S]: 1 / the number of samples of each sample's trajectory, so that each trajectory counts once."""
    return 1 / np.bincount(batch.trajectories)[batch.trajectories]


def per_group(batch: Batch, values: np.ndarray, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """[N] f32 from [S]: function(values [n], shares [n]) -> [n] of each group, spread over the tokens."""
    weights, edges = trajectory_weights(batch), np.flatnonzero(np.diff(batch.group_of)) + 1
    parts = [function(v, w) for v, w in zip(np.split(values, edges), np.split(weights, edges), strict=True)]
    return batch.to_tokens(np.concatenate(parts).astype(np.float32))


def group_normalised(batch: Batch, rewards: np.ndarray, *, std_normalization: bool) -> np.ndarray:
    """[N] f32 from [S]: grpo_advantages of each group, spread over the tokens."""
    return per_group(batch, rewards, lambda of_group, weights: grpo_advantages(of_group, weights, std_normalization=std_normalization))


class MeanBaseline(PolicyGradient):
    """The base of algorithms with A = r - mean over the group, the same for all tokens of a sample."""

    compares_groups = True

    def advantages(self, batch: Batch) -> np.ndarray:
        return group_normalised(batch, rewards_with_kl(batch, self.config.algorithm), std_normalization=False)


def grpo_advantages(rewards: np.ndarray, weights: np.ndarray | None = None, *, std_normalization: bool = True) -> np.ndarray:
    """(r - mean) / (population std + 1e-4) over one group of any size, [n] f32; equal rewards give exactly 0.

    weights: [n], what each counts in mean and std (all alike); with 1 / the number of its trajectory's samples each trajectory counts
    once. Without std_normalization only the mean is subtracted.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or np.all(values == values[0]):  # the mean of equal floats need not equal them
        return np.zeros(values.shape, dtype=np.float32)
    centred = values - np.average(values, weights=weights)
    std = np.sqrt(np.average(centred**2, weights=weights))
    return (centred / (std + STD_FLOOR) if std_normalization else centred).astype(np.float32)

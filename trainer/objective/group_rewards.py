"""Blocks for advantages from rewards: the KL in the reward, and a function of each group's rewards.

N tokens of the batch   S samples   n samples of one group
"""

from collections.abc import Callable

import numpy as np
import torch

from slimebus.cli.config.schema import AlgorithmConfig
from trainer.batches.batch import Batch
from trainer.objective.kl import KL_ESTIMATORS


def token_kl(batch: Batch, algorithm: AlgorithmConfig) -> np.ndarray:
    """kl_coef * KL(old || reference) of each token, [N] f64; 0 where the mask is 0, and everywhere without a kl_coef."""
    if not algorithm.kl_coef:
        return np.zeros(batch.num_tokens)
    old = batch["rollout_logprobs" if algorithm.use_rollout_logprobs else "old_logprobs"]
    sides = [torch.from_numpy(np.where(batch["loss_mask"] > 0, side, 0.0)) for side in (old, batch.per_token("reference_logprobs"))]
    return algorithm.kl_coef * KL_ESTIMATORS[algorithm.kl_loss_type](*sides).numpy()


def rewards_with_kl(batch: Batch, algorithm: AlgorithmConfig) -> np.ndarray:
    """The reward of each sample's trajectory, [S] f64, less kl_coef times the KL of all its tokens."""
    if not algorithm.kl_coef:
        return batch["reward"]
    return batch["reward"] - batch.trajectory_sums(batch.sample_sums(token_kl(batch, algorithm)))


def shares(batch: Batch) -> np.ndarray:
    """[S]: 1 / the number of samples of each sample's trajectory, so that each trajectory counts once, whatever their number."""
    return 1 / np.bincount(batch.trajectories)[batch.trajectories]


def per_group(batch: Batch, values: np.ndarray, function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """[N] f32 from [S]: function(values [n], shares [n]) -> [n] of each group, spread over the tokens."""
    weights, edges = shares(batch), np.flatnonzero(np.diff(batch.group_of)) + 1
    parts = [function(v, w) for v, w in zip(np.split(values, edges), np.split(weights, edges), strict=True)]
    return batch.to_tokens(np.concatenate(parts).astype(np.float32))

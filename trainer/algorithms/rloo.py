"""RLOO: a reward against the others of its group. Ahmadian et al., "Back to Basics" (2024); Kool et al. (2019)."""

import numpy as np

from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.group_rewards import rewards_with_kl
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class Rloo(ClippedPolicyGradient):
    """The clipped loss with A = r - mean of the group's other trajectories; the KL belongs in the reward (kl_coef).

    The losses are summed (`constant`), as the paper's gradient is that of the log-probability of sequences. The ratio is that of each
    token, as in verl; TRL's is the product over the sequence.
    """

    aggregation = "constant"
    compares_groups = True

    def advantages(self, batch: Batch) -> np.ndarray:
        rewards, edges = rewards_with_kl(batch, self.config.algorithm), np.flatnonzero(np.diff(batch.group_of)) + 1
        parts = [leave_one_out(r, t) for r, t in zip(np.split(rewards, edges), np.split(batch.trajectories, edges), strict=True)]
        return batch.to_tokens(np.concatenate(parts).astype(np.float32))

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)


def leave_one_out(rewards: np.ndarray, trajectories: np.ndarray) -> np.ndarray:
    """r - mean of the other trajectories' r, [n]; 0 in a group of one trajectory. trajectories: [n], which one each sample is a part of.

    A trajectory counts once, with the mean of its samples' rewards.
    """
    _, own, counts = np.unique(trajectories, return_inverse=True, return_counts=True)
    if len(counts) < 2 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards))
    means = np.bincount(own, weights=rewards) / counts
    return rewards - ((means.sum() - means) / (len(counts) - 1))[own]

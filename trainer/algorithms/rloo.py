"""RLOO: a reward against the others of its group. Ahmadian et al., "Back to Basics" (2024); Kool et al. (2019)."""

from collections.abc import Iterator

import numpy as np

from trainer.batches.batch import Batch
from trainer.objective.clipped import ClippedPolicyGradient
from trainer.objective.group_rewards import group_of_one, per_group, rewards_with_kl


class Rloo(ClippedPolicyGradient):
    """The clipped loss with A = r - mean of the group's other trajectories; the KL belongs in the reward (kl_coef).

    The losses are summed (`constant`), as the paper's gradient is that of the log-probability of sequences. The ratio is that of each
    token, as in verl; TRL's is the product over the sequence.
    """

    aggregation = "constant"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from group_of_one(self.config)

    def advantages(self, batch: Batch) -> np.ndarray:
        return per_group(batch, rewards_with_kl(batch, self.config.algorithm), leave_one_out)


def leave_one_out(rewards: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """r - mean of the other trajectories' r, [n]; 0 in a group of one trajectory. shares: [n], 1 / the samples of its trajectory."""
    num_trajectories = round(float(shares.sum()))
    if num_trajectories < 2 or np.all(rewards == rewards[0]):
        return np.zeros(len(rewards))
    return (rewards - np.average(rewards, weights=shares)) * num_trajectories / (num_trajectories - 1)

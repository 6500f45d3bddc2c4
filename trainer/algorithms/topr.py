"""TOPR: samples of another policy, good ones in full, bad ones tapered. Le Roux et al., "Tapered Off-Policy REINFORCE" (2025)."""

from collections.abc import Iterator

import numpy as np
import torch

from trainer.batches.batch import Batch
from trainer.objective.clip import ratio_of
from trainer.objective.group_rewards import group_normalised, group_of_one, rewards_with_kl
from trainer.objective.plugin import PolicyGradient, TokenLoss
from trainer.objective.row import Row


class Topr(PolicyGradient):
    """-a A log p_new per token, A = r - mean; a = 1 for a sequence of A >= 0, else sg(min(1, p_new / p_rollout of the whole sequence)).

    A sequence is bad where the mean of its advantages is below 0. The losses are summed (`constant`), as the paper's gradient is that of
    the log-probability of sequences. It always compares with the sampler, whatever use_rollout_logprobs says.
    """

    aggregation = "constant"
    compares_with_old = False
    reads_rollout_logprobs = True

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from group_of_one(self.config)

    def advantages(self, batch: Batch) -> np.ndarray:
        return group_normalised(batch, rewards_with_kl(batch, self.config.algorithm), std_normalization=False)

    def loss(self, row: Row) -> TokenLoss:
        ratio = ratio_of(row.sequence_sum(row.new_logprobs.detach() - row.rollout_logprobs)).clamp(max=1.0)
        weight = torch.where(row.sequence_sum(row.advantages) < 0, ratio, 1.0)
        return TokenLoss(-weight * row.advantages * row.new_logprobs, {"topr_weight": weight})

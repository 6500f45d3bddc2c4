"""TOPR: samples of another policy, good ones in full, bad ones tapered. Le Roux et al., "Tapered Off-Policy REINFORCE" (2025)."""

import torch

from trainer.objective.clip import ratio_of
from trainer.objective.group_rewards import MeanBaseline
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class Topr(MeanBaseline):
    """-a A log p_new per token, A = r - mean; a = 1 for a sequence of A >= 0, else sg(min(1, p_new / p_rollout of the whole sequence)).

    A sequence is bad where the mean of its advantages is below 0. The losses are summed (`constant`), as the paper's gradient is that of
    the log-probability of sequences. It always compares with the sampler, for any use_rollout_logprobs.
    """

    aggregation = "constant"
    compares_with = "rollout"

    def loss(self, row: Row) -> TokenLoss:
        ratio = ratio_of(row.sequence_sum(row.new_logprobs.detach() - row.rollout_logprobs)).clamp(max=1.0)
        weight = torch.where(row.sequence_sum(row.advantages) < 0, ratio, 1.0)
        return TokenLoss(-weight * row.advantages * row.new_logprobs, {"topr_weight": weight})

"""REINFORCE++ with the group's mean as baseline. Hu et al., "REINFORCE++" (2025)."""

import numpy as np

from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.group_rewards import group_normalised, token_kl
from trainer.objective.plugin import TokenLoss
from trainer.objective.returns import whitened
from trainer.objective.row import Row


class ReinforcePlusPlusBaseline(ClippedPolicyGradient):
    """The clipped loss with A = (a - mean) / std over all trained tokens of the batch, a = r - mean of the group's r.

    With kl_coef, a is less by kl_coef KL(old || reference) of each token (slime's form); the paper has the KL in the loss: kl_loss_coef
    with kl_loss_type k2.
    """

    compares_groups = True

    def advantages(self, batch: Batch) -> np.ndarray:
        centred = group_normalised(batch, batch["reward"], std_normalization=False)
        return whitened(batch, centred - token_kl(batch, self.config.algorithm))

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)

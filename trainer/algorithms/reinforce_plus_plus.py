"""REINFORCE++: returns against the whole batch. Hu et al., "REINFORCE++" (2025)."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.plugin import TokenLoss
from trainer.objective.returns import discounted_sums, token_rewards, whitened
from trainer.objective.row import Row


class ReinforcePlusPlus(ClippedPolicyGradient):
    """The clipped loss with A = (G - mean) / std over all trained tokens of the batch, G_t the discounted sum of the rewards from t on.

    The rewards of a sample are -kl_coef KL(old || reference) at each token, and r besides at the last.
    """

    class Settings(ClippedPolicyGradient.Settings, frozen=True):
        """Those of the clip, and of the returns."""

        gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
        """[factor] What a reward one trained token later counts."""

    settings: Settings

    def advantages(self, batch: Batch) -> np.ndarray:
        return whitened(batch, discounted_sums(batch, token_rewards(batch, self.config.algorithm), self.settings.gamma))

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)

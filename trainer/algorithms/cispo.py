"""CISPO: the importance weight is clipped, and no token loses its gradient. MiniMax, "MiniMax-M1" (2025), eq. 4 and 5."""

import numpy as np

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import ratio_of
from trainer.objective.group_rewards import group_normalised, rewards_with_kl
from trainer.objective.plugin import Clip, PolicyGradient, TokenLoss
from trainer.objective.row import Row


class Cispo(PolicyGradient):
    """-sg(clip(w, 1 - eps_clip, 1 + eps_clip_high)) A log p_new per token, with w and A of GRPO.

    The paper sets no lower bound (eps_clip 1: w is never below 0) and gives no upper one; 1 + 4 is the cap of Khatri et al., "The Art of
    Scaling Reinforcement Learning Compute for LLMs" (2025). TRL's epsilon_high is the cap itself, slime's and ours what is above 1.
    """

    needs_ratio = True
    compares_groups = True

    class Settings(PolicyGradient.Settings, frozen=True):
        """Of the weight and the advantages."""

        eps_clip: NonNegative = 1.0
        """[ratio] The importance weight is at least 1 - eps_clip; 1: no lower bound."""
        eps_clip_high: NonNegative = 4.0
        """[ratio] ... and at most 1 + eps_clip_high."""
        grpo_std_normalization: bool = True
        """[switch] Divide a group's advantages by its standard deviation."""

    settings: Settings

    @property
    def clip(self) -> Clip:
        return Clip(1.0 - self.settings.eps_clip, 1.0 + self.settings.eps_clip_high)

    def advantages(self, batch: Batch) -> np.ndarray:
        rewards = rewards_with_kl(batch, self.config.algorithm)
        return group_normalised(batch, rewards, std_normalization=self.settings.grpo_std_normalization)

    def loss(self, row: Row) -> TokenLoss:
        ratio = ratio_of(row.new_logprobs.detach() - row.old_logprobs)
        weight = ratio.clamp(self.clip.low, self.clip.high)
        return TokenLoss(-weight * row.advantages * row.new_logprobs, {"pg_clipfrac": (weight != ratio).float()})

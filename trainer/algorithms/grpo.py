"""GRPO: a reward against its group. Shao et al., "DeepSeekMath" (2024), section 4.1.2."""

import numpy as np

from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.group_rewards import group_normalised, rewards_with_kl
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class Grpo(ClippedPolicyGradient):
    """-min(w A, clip(w, 1 - eps_clip, 1 + eps_clip_high) A) per token with w = p_new / p_old (clip.py: the dual clip) and
    A = (r - mean) / (std + 1e-4) over the group, the same for all tokens of a sample."""

    compares_groups = True

    class Settings(ClippedPolicyGradient.Settings, frozen=True):
        """Of the clip and the advantages."""

        grpo_std_normalization: bool = True
        """[switch] Divide a group's advantages by its standard deviation."""

    settings: Settings

    def rewards(self, batch: Batch) -> np.ndarray:
        """[S] f64: what is compared within the group."""
        return rewards_with_kl(batch, self.config.algorithm)

    def advantages(self, batch: Batch) -> np.ndarray:
        return group_normalised(batch, self.rewards(batch), std_normalization=self.settings.grpo_std_normalization)

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)

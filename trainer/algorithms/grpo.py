"""GRPO: a reward against its group. Shao et al., "DeepSeekMath" (2024), section 4.1.2."""

import numpy as np

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clipped import ClippedPolicyGradient
from trainer.objective.group_rewards import group_normalised, rewards_with_kl


class Grpo(ClippedPolicyGradient):
    """The clipped loss with A = (r - mean) / (std + 1e-4) over the group, the same for all tokens of a sample."""

    compares_groups = True

    class Settings(ClippedPolicyGradient.Settings, frozen=True):
        """Of the clip and the advantages."""

        eps_clip_high: NonNegative = 0.28
        """[ratio] ... and above at 1 + eps_clip_high."""
        grpo_std_normalization: bool = True
        """[switch] Divide a group's advantages by its standard deviation."""

    settings: Settings

    def rewards(self, batch: Batch) -> np.ndarray:
        """[S] f64: what is compared within the group."""
        return rewards_with_kl(batch, self.config.algorithm)

    def advantages(self, batch: Batch) -> np.ndarray:
        return group_normalised(batch, self.rewards(batch), std_normalization=self.settings.grpo_std_normalization)

"""Truncated importance sampling between trainer and sampler: Ionides (2008); Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025).
"""

from slimebus.cli.config.schema import NonNegative
from trainer.objective.clip import ratio_of
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Tis(Correction):
    """min(p_old / p_rollout, tis_clip) per token."""

    class Settings(Correction.Settings, frozen=True):
        """Of the weight."""

        tis_clip: NonNegative = 2.0
        """[ratio] Upper bound of the weight."""

    settings: Settings

    def weight(self, row: Row) -> TokenWeight:
        weight = ratio_of(row.old_logprobs - row.rollout_logprobs).clamp(max=self.settings.tis_clip)
        return TokenWeight(weight, {"tis": weight, "tis_clipfrac": (weight >= self.settings.tis_clip).float()})

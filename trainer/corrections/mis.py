"""Masked importance sampling: a weight that is far from 1 takes its tokens out, where `tis` truncates it. Liu et al., "When Speed Kills
Stability" (2025).
"""

from collections.abc import Iterator

from slimebus.config.schema import NonNegative
from trainer.objective.importance import Level, bounds_problems, kept_within
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Mis(Correction):
    """w where mis_low <= w <= mis_high, else 0; w = p_old / p_rollout of the token, of its sample, or the sample's geometric mean.

    `sequence` is the product, as in TRL, which grows with length: a mean difference of 0.012 makes 3.3 of 100 tokens. No denominator
    changes: what is out counts as a loss of 0 (as in TRL, slime and AReaL).
    """

    class Settings(Correction.Settings, frozen=True):
        """Of the weight."""

        mis_level: Level = "token"
        """[choice] Judge each token by its own ratio, or all tokens of a sample by the product or the geometric mean of theirs."""
        mis_low: NonNegative = 0.5
        """[ratio] Least weight that is kept."""
        mis_high: NonNegative = 2.0
        """[ratio] Largest weight that is kept."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        yield from bounds_problems(self.settings.mis_low, self.settings.mis_high, "mis")

    def weight(self, row: Row) -> TokenWeight:
        weight, dropped = kept_within(row, self.settings.mis_level, self.settings.mis_low, self.settings.mis_high)
        return TokenWeight(weight, {"mis": weight, "mis_dropped": dropped})

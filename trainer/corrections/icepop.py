"""IcePop: Ling team, "Every Step Evolves: Scaling Reinforcement Learning for Trillion-Scale Thinking Model" (Ring-1T, arXiv 2510.18855)."""

from collections.abc import Iterator

from slimebus.config.schema import NonNegative
from trainer.objective.importance import bounds_problems, kept_within
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class IcePop(Correction):
    """k where icepop_low <= k <= icepop_high, else 0, with k = p_old / p_rollout of the token: `mis` of tokens with the paper's bounds.

    Both bounds hold (in slime the lower one is 0 unless it is given). The denominator keeps what is masked.
    """

    class Settings(Correction.Settings, frozen=True):
        """Of the mask."""

        icepop_low: NonNegative = 0.5
        """[ratio] Least ratio that is kept."""
        icepop_high: NonNegative = 5.0
        """[ratio] Largest ratio that is kept."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        yield from bounds_problems(self.settings.icepop_low, self.settings.icepop_high, "icepop")

    def weight(self, row: Row) -> TokenWeight:
        weight, dropped = kept_within(row, "token", self.settings.icepop_low, self.settings.icepop_high)
        return TokenWeight(weight, {"icepop_dropped": dropped})

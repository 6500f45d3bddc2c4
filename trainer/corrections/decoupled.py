"""Decoupled PPO: Hilton et al., "Batch size-invariance for policy optimization" (arXiv 2110.00641), section 3; for stale samples Fu et al.,
"AReaL" (arXiv 2505.24298), eq. 5.
"""

from slimebus.config.schema import NonNegative
from trainer.objective.importance import kept_within
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Decoupled(Correction):
    """w = p_old / p_rollout per token times the loss, with ratio and clip against old, the policy before the batch; 0 where w is above
    decoupled_cap.

        sg(w) min(r A, clip(r) A),  r = p_new / p_old

    As in AReaL a token beyond the cap is masked, not truncated, there is no lower bound, and the denominator keeps it. AReaL of May 2026
    leaves w out unless its rejection sampling is configured; here it is always applied. With one optimizer step on a batch r is 1.
    """

    needs_rollout_as_old = False

    class Settings(Correction.Settings, frozen=True):
        """Of the weight."""

        decoupled_cap: NonNegative = 5.0
        """[ratio] Largest weight that is kept; AReaL's behav_imp_weight_cap."""

    settings: Settings

    def weight(self, row: Row) -> TokenWeight:
        weight, dropped = kept_within(row, "token", 0.0, self.settings.decoupled_cap)
        return TokenWeight(weight, {"decoupled_weight": weight, "decoupled_dropped": dropped})

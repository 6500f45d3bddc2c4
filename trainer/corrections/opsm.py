"""Off-policy sequence masking: DeepSeek-V3.2 (2025), section 3.1, eq. 9."""

from trainer.objective.importance import drift
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Opsm(Correction):
    """0 for all tokens of a sample with a negative advantage and mean(log p_rollout - log p_new) > opsm_delta, else 1.

    The mean is over its trained tokens, against the sampler itself: lag and engine mismatch. A sample is negative where the sum of its
    tokens' advantages is (slime looks at each token's, and lets parts of a sample pass). The denominator keeps what is masked.
    """

    is_importance_weight = False

    class Settings(Correction.Settings, frozen=True):
        """Of the mask."""

        opsm_delta: float = 1e-4
        """[nats] Largest mean drift of a bad sample that is trained; slime's default, TRL suggests 0.5."""

    settings: Settings

    def weight(self, row: Row) -> TokenWeight:
        is_out = (row.sequence_sum(row.advantages) < 0) & (-row.sequence_mean(drift(row)) > self.settings.opsm_delta)
        return TokenWeight((~is_out).float(), {"opsm_dropped": is_out.float()})

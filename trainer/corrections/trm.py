"""Trust region masking: Li et al., "Trust Region Masking for Long-Horizon LLM Reinforcement Learning" (arXiv 2512.23075)."""

from collections.abc import Iterator

from slimebus.config.schema import NonNegative
from trainer.objective.importance import drift
from trainer.objective.kl import k3
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Trm(Correction):
    """0 for all tokens of a sample where one token's divergence exceeds trm_max, or their mean exceeds trm_mean, else 1.

    The paper bounds KL(p_rollout || p_new) of whole distributions; of it there is one token. Its estimates here: k2 = d^2 / 2 for the
    maximum, k3 = exp(d) - 1 - d for the mean, d = log(p_new / p_rollout). The denominator keeps what is masked.
    """

    is_importance_weight = False

    class Settings(Correction.Settings, frozen=True):
        """Of the mask."""

        trm_max: NonNegative = 0.0
        """[nats] Largest k2 of a token; 0: no such bound."""
        trm_mean: NonNegative = 0.0
        """[nats] Largest mean k3 of a sample; 0: no such bound."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        if not self.settings.trm_max and not self.settings.trm_mean:
            yield "algorithm.settings.trm_max: 0, as trm_mean is, so trm masks nothing; no default is known to fit: set one of them"

    def weight(self, row: Row) -> TokenWeight:
        d = drift(row)
        limit_max, limit_mean = (bound or float("inf") for bound in (self.settings.trm_max, self.settings.trm_mean))
        is_out = row.sequence_sum((0.5 * d.square() > limit_max).float()) > 0
        is_out |= row.sequence_mean(k3(row.rollout_logprobs, row.new_logprobs.detach())) > limit_mean
        return TokenWeight((~is_out).float(), {"trm_dropped": is_out.float()})

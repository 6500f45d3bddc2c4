"""VESPO: "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training" (arXiv 2602.10693)."""

import torch

from slimebus.config.schema import NonNegative
from trainer.objective.clip import LOG_RATIO_LIMIT
from trainer.objective.importance import log_weight
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Vespo(Correction):
    """phi(w) = exp(lambda + k log w - lambda w), w = p_new / p_rollout of the whole sample (product): phi(1) = 1, and 0 far from it.

    (k, lambda) = (2, 3) where A >= 0 and (3, 2) where A < 0, the defaults of the authors' code and of TRL (the code's docstring has
    others). The loss is -phi A log p, without ratio or clip. At |log w| above 2 or 3 almost nothing is left: a soft mask of samples.
    """

    needs_rollout_as_old = True

    class Settings(Correction.Settings, frozen=True):
        """Of the kernel."""

        vespo_k_pos: NonNegative = 2.0
        """[exponent] k where the advantage is not negative."""
        vespo_lambda_pos: NonNegative = 3.0
        """[rate] lambda there."""
        vespo_k_neg: NonNegative = 3.0
        """[exponent] k where the advantage is negative."""
        vespo_lambda_neg: NonNegative = 2.0
        """[rate] lambda there."""

    settings: Settings

    def weight(self, row: Row) -> TokenWeight:
        s, log_w = self.settings, log_weight(row, "sequence").clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        is_good = row.advantages >= 0
        of_good = s.vespo_lambda_pos + s.vespo_k_pos * log_w - s.vespo_lambda_pos * log_w.exp()
        of_bad = s.vespo_lambda_neg + s.vespo_k_neg * log_w - s.vespo_lambda_neg * log_w.exp()
        phi = torch.where(is_good, of_good, of_bad).exp()
        return TokenWeight(phi, {"vespo_phi": phi})

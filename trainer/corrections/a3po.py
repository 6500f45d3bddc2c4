"""A-3PO: "A-3PO: Accelerating Asynchronous LLM Training with Staleness-aware Proximal Policy Approximation" (arXiv 2512.06547)."""

import torch

from slimebus.config.schema import NonNegative
from trainer.objective.importance import kept_within
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class A3po(Correction):
    """`decoupled` with an old policy that is interpolated, token by token, instead of computed in a forward pass:

        log p_old = log p_rollout + a (log p_new - log p_rollout),  a = (lag - 1) / lag, 0 at lag 0

    p_new without gradient; the paper's a is (v_old - v_rollout) / (v_new - v_rollout) with v_old = v_new - 1. So at lag k the clip holds
    (p_new / p_rollout)^(1/k), which widens its range, and the weight is the other part, masked above a3po_cap. At lag 0 and 1 it is the
    clip against the sampler.
    """

    needs_rollout_as_old = False

    class Settings(Correction.Settings, frozen=True):
        """Of the weight."""

        a3po_cap: NonNegative = 5.0
        """[ratio] Largest weight that is kept."""

    settings: Settings

    def old_logprobs(self, row: Row) -> torch.Tensor:
        a = 1 - 1 / row["lag"].clamp_min(1)
        return row.rollout_logprobs + a * (row.new_logprobs.detach() - row.rollout_logprobs)

    def weight(self, row: Row) -> TokenWeight:
        weight, dropped = kept_within(row, "token", 0.0, self.settings.a3po_cap)
        return TokenWeight(weight, {"a3po_weight": weight, "a3po_dropped": dropped})

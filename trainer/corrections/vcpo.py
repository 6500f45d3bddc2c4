"""VCPO: Huang et al., "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs" (arXiv 2602.17616): its learning rate."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import ratio_of
from trainer.objective.importance import effective_share, log_ratios, log_weight
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Vcpo(Correction):
    """min(w, vcpo_clip) with w = p_new / p_rollout of the whole sample (product), and lr * sqrt(min(1, ESS / (B vcpo_base_ess))).

    ESS = (sum w)^2 / sum w^2 over the B samples of the optimizer step on all ranks, of groups with a signal, w not truncated. No ratio, no
    clip. w varies more the longer the samples are: on long ones ESS / B is near 1 / B for any drift. The paper's baseline (OPOB),
    which weighs rewards by w^2 |grad log p|^2 of each sample, is not here: it takes a backward pass and a norm over all ranks for each.
    """

    needs_rollout_as_old = True

    class Settings(Correction.Settings, frozen=True):
        """Of the weight and the learning rate."""

        vcpo_clip: NonNegative = 8.0
        """[ratio] Upper bound of the weight."""
        vcpo_base_ess: Annotated[float, Meta(gt=0, le=1)] = 1.0
        """[share] ESS / B from which on the learning rate is whole."""

    settings: Settings

    def learning_rate_factor(self, part: Batch) -> float:
        counted = (part.sample_sums(np.ones(part.num_tokens)) > 0) & part.has_signal[part.group_of]
        share = effective_share(log_ratios(part, "new_logprobs", "sequence")[counted])
        return float(np.sqrt(min(share / self.settings.vcpo_base_ess, 1.0)))

    def weight(self, row: Row) -> TokenWeight:
        ratio = ratio_of(log_weight(row, "sequence"))
        weight = ratio.clamp(max=self.settings.vcpo_clip)
        return TokenWeight(weight, {"vcpo_weight": weight, "vcpo_clipfrac": (ratio >= self.settings.vcpo_clip).float()})

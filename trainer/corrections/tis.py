"""Truncated importance sampling between trainer and sampler: Ionides (2008); Yao et al., "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training" (2025).
"""

from collections.abc import Iterator, Mapping

import numpy as np

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch, Column
from trainer.objective.clip import LOG_RATIO_LIMIT, ratio_of
from trainer.objective.importance import Level, bounds_problems, log_ratios, log_weight
from trainer.objective.plugin import Correction, TokenWeight
from trainer.objective.row import Row


class Tis(Correction):
    """clip(w, tis_clip_low, tis_clip), w = p_old / p_rollout of the token, of its sample, or the sample's geometric mean.

    `sequence` is the product over a sample's tokens (TRL's `sequence_truncate`); ms-swift gives that name to the geometric mean.
    """

    class Settings(Correction.Settings, frozen=True):
        """Of the weight."""

        tis_level: Level = "token"
        """[choice] Weigh each token by its own ratio, or all tokens of a sample by the product or the geometric mean of theirs."""
        tis_clip: NonNegative = 2.0
        """[ratio] Upper bound of the weight."""
        tis_clip_low: NonNegative = 0.0
        """[ratio] Lower bound of the weight."""
        tis_batch_normalize: bool = False
        """[switch] Divide by the mean weight of the optimizer step, over tokens, or over samples where they are weighed; one more forward
        pass."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        yield from bounds_problems(self.settings.tis_clip_low, self.settings.tis_clip, "tis_clip")

    @property
    def _numerator(self) -> str:
        return "current_logprobs" if self.config.algorithm.use_rollout_logprobs else "old_logprobs"

    def needs(self) -> set[str]:
        return {self._numerator} if self.settings.tis_batch_normalize else set()

    def prepare(self, part: Batch) -> Mapping[str, Column]:
        s = self.settings
        if not s.tis_batch_normalize:
            return {}
        d = log_ratios(part, self._numerator, s.tis_level)
        counted = part["loss_mask"] > 0 if s.tis_level == "token" else part.sample_sums(np.ones(part.num_tokens)) > 0
        weights = np.exp(d[counted].clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).clip(s.tis_clip_low, s.tis_clip)
        return {"tis_scale": Column(np.full(part.num_groups, 1 / max(weights.mean(), 1e-8)), "group")}

    def weight(self, row: Row) -> TokenWeight:
        low, high = self.settings.tis_clip_low, self.settings.tis_clip
        ratio = ratio_of(log_weight(row, self.settings.tis_level))
        weight = ratio.clamp(low, high) * (row["tis_scale"] if self.settings.tis_batch_normalize else 1.0)
        return TokenWeight(weight, {"tis": weight, "tis_clipfrac": ((ratio >= high) | (ratio <= low)).float()})

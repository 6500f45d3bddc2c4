"""GRPO: a reward against its group. Shao et al., "DeepSeekMath" (2024), section 4.1.2."""

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from msgspec import Meta

from slimebus.cli.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import clipped_loss
from trainer.objective.group_rewards import per_group, rewards_with_kl
from trainer.objective.plugin import PolicyGradient, TokenLoss
from trainer.objective.row import Row

STD_FLOOR = 1e-4  # keeps a group of almost equal rewards finite


class Grpo(PolicyGradient):
    """-min(w A, clip(w, 1 - eps_clip, 1 + eps_clip_high) A) per token, w = new / old probability, A = (r - mean) / (std + 1e-4)."""

    class Settings(PolicyGradient.Settings, frozen=True):
        """Of the clip and the advantages."""

        eps_clip: NonNegative = 0.2
        """[ratio] The importance ratio is clipped below at 1 - eps_clip."""
        eps_clip_high: NonNegative = 0.28
        """[ratio] ... and above at 1 + eps_clip_high."""
        eps_clip_c: Annotated[float, Meta(ge=0)] = 0.0
        """[ratio] Dual clip: where the advantage is negative the loss is at most this times its size; above 1, or 0 for no such bound."""
        grpo_std_normalization: bool = True
        """[switch] Divide a group's advantages by its standard deviation."""

    settings: Settings

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from self.group_of_one()
        if 0 < self.settings.eps_clip_c <= 1:
            why = "the dual clip would bound the loss where the ratio is 1; expected above 1, or 0 for none"
            yield f"algorithm.settings.eps_clip_c: {self.settings.eps_clip_c:g}; {why}"

    def group_of_one(self) -> Iterator[str]:
        """The problem of a group that is compared with itself."""
        if (size := self.config.rollout.n_samples_per_prompt) < 2:
            yield (
                f"rollout.n_samples_per_prompt: {size}; advantage_estimator {self.config.algorithm.advantage_estimator} compares the "
                "samples of a group, so a group of one has advantage 0 and trains nothing; sample 2 or more"
            )

    def advantages(self, batch: Batch) -> np.ndarray:
        def of_group(rewards: np.ndarray, shares: np.ndarray) -> np.ndarray:
            return grpo_advantages(rewards, shares, std_normalization=self.settings.grpo_std_normalization)

        return per_group(batch, rewards_with_kl(batch, self.config.algorithm), of_group)

    def loss(self, row: Row) -> TokenLoss:
        s = self.settings
        log_ratio = row.new_logprobs - row.old_logprobs
        loss, clipped = clipped_loss(log_ratio, row.advantages, (1.0 - s.eps_clip, 1.0 + s.eps_clip_high), s.eps_clip_c)
        return TokenLoss(loss, {"pg_clipfrac": clipped})


def grpo_advantages(rewards: np.ndarray, weights: np.ndarray | None = None, *, std_normalization: bool = True) -> np.ndarray:
    """(r - mean) / (population std + 1e-4) over one group of any size, [n] f32; equal rewards give exactly 0.

    weights: [n], what each counts in mean and std (all alike); with 1 / the number of its trajectory's samples each trajectory counts
    once. Without std_normalization only the mean is subtracted.
    """
    values = np.asarray(rewards, dtype=np.float64)
    if values.size == 0 or np.all(values == values[0]):  # the mean of equal floats need not equal them
        return np.zeros(values.shape, dtype=np.float32)
    centred = values - np.average(values, weights=weights)
    std = np.sqrt(np.average(centred**2, weights=weights))
    return (centred / (std + STD_FLOOR) if std_normalization else centred).astype(np.float32)

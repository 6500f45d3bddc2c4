"""The base of algorithms with the clipped loss of PPO: they say what their advantages are."""

from collections.abc import Iterator
from typing import Annotated

import torch
from msgspec import Meta

from slimebus.config.schema import NonNegative
from trainer.objective.clip import clipped_loss
from trainer.objective.plugin import PolicyGradient, TokenLoss
from trainer.objective.row import Row


class ClippedPolicyGradient(PolicyGradient):
    """-min(w A, clip(w, 1 - eps_clip, 1 + eps_clip_high) A) per token, w = new / old probability (clip.py: the papers, dual clip)."""

    class Settings(PolicyGradient.Settings, frozen=True):
        """Of the clip."""

        eps_clip: NonNegative = 0.2
        """[ratio] The importance ratio is clipped below at 1 - eps_clip."""
        eps_clip_high: NonNegative = 0.2
        """[ratio] ... and above at 1 + eps_clip_high."""
        eps_clip_c: Annotated[float, Meta(ge=0)] = 0.0
        """[ratio] Dual clip: where the advantage is negative the loss is at most this times its size; above 1, or 0 for no such bound."""

    settings: Settings
    ratio_settings = ("eps_clip", "eps_clip_high", "eps_clip_c")

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if 0 < self.settings.eps_clip_c <= 1:
            why = "the dual clip would bound the loss where the ratio is 1; expected above 1, or 0 for none"
            yield f"algorithm.settings.eps_clip_c: {self.settings.eps_clip_c:g}; {why}"

    def log_ratio(self, row: Row) -> torch.Tensor:
        """log w of each token, [1, t] with gradient."""
        return row.new_logprobs - row.old_logprobs

    def loss(self, row: Row) -> TokenLoss:
        s = self.settings
        loss, clipped = clipped_loss(self.log_ratio(row), row.advantages, (1.0 - s.eps_clip, 1.0 + s.eps_clip_high), s.eps_clip_c)
        return TokenLoss(loss, {"pg_clipfrac": clipped})

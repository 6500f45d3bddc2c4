"""Bounding an importance ratio, and what algorithms with the clipped loss of PPO have in common. Shapes are those of the arguments."""

from collections.abc import Iterator

import torch

from slimebus.config.schema import NonNegative
from trainer.objective.plugin import Clip, PolicyGradient, TokenLoss

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it a term is an outlier, and its size carries nothing


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), finite for any finite argument."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, clip: Clip, dual_clip: float = 0.0) -> TokenLoss:
    """-min(w A, clip(w, low, high) A) per token with w = exp(log_ratio); where the clip took the gradient away (0 or 1), and the largest w
    of a bad token that kept it: nothing else bounds what one token adds to the gradient.

    Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with separate low and high bounds. dual_clip c > 1: where
    A < 0 the loss is at most -c A. Ye et al., "Mastering Complex Control in MOBA Games" (2020), eq. 5.
    """
    ratio = ratio_of(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(clip.low, clip.high) * advantages)
    clipped = ((ratio > clip.high) & (advantages > 0)) | ((ratio < clip.low) & (advantages < 0))
    if dual_clip:
        bound = -dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (loss > bound))
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    kept = torch.where((advantages < 0) & ~clipped, ratio.detach(), 0.0)
    return TokenLoss(loss, {"pg_clipfrac": clipped.float(), "pg_ratio_max": kept})


class ClippedPolicyGradient(PolicyGradient):
    """The base of algorithms with clipped_loss: its settings."""

    class Settings(PolicyGradient.Settings, frozen=True):
        """Of the clip."""

        eps_clip: NonNegative = 0.2
        """[ratio] The importance ratio is clipped below at 1 - eps_clip."""
        eps_clip_high: NonNegative | None = None
        """[ratio] ... and above at 1 + eps_clip_high; empty: as eps_clip."""
        eps_clip_c: NonNegative = 0.0
        """[ratio] Dual clip: where the advantage is negative the loss is at most this times its size; above 1, or 0 for no such bound."""

    settings: Settings

    @property
    def clip(self) -> Clip:
        low, high = self.settings.eps_clip, self.settings.eps_clip_high
        return Clip(1.0 - low, 1.0 + (low if high is None else high))

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if 0 < self.settings.eps_clip_c <= 1:
            why = "the dual clip would bound the loss where the ratio is 1; expected above 1, or 0 for none"
            yield f"algorithm.settings.eps_clip_c: {self.settings.eps_clip_c:g}; {why}"

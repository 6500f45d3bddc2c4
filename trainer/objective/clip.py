"""Bounding an importance ratio. Shapes are those of the arguments."""

import torch

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it a term is an outlier whose size carries nothing


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(log_ratio), finite for any finite argument."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_loss(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: tuple[float, float], dual_clip: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(w A, clip(w, low, high) A) per token with w = exp(log_ratio), and where the clip took the gradient away (0 or 1).

    Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with separate low and high bounds. dual_clip c > 1: where
    A < 0 the loss is at most -c A. Ye et al., "Mastering Complex Control in MOBA Games" (2020), eq. 5.
    """
    low, high = clip_range
    ratio = ratio_of(log_ratio)
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    if dual_clip:
        bound = -dual_clip * advantages
        clipped = clipped | ((advantages < 0) & (loss > bound))
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    return loss, clipped.float()

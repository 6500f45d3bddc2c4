"""The clipped policy loss with its corrections for samples of another policy, KL and entropy terms.

PPO clip: Schulman et al., "Proximal Policy Optimization Algorithms" (2017), eq. 7, with separate low and high bounds.
Truncated importance sampling: Ionides (2008); between trainer and sampler as in Yao et al., "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training" (2025).
"""

import torch

from slimebus.cli.config.schema import AlgorithmConfig
from trainer.algorithms.kl import KL_ESTIMATORS, LOG_RATIO_LIMIT
from trainer.algorithms.terms import TokenLoss, TokenTerms


def clipped_loss(log_ratio: torch.Tensor, advantages: torch.Tensor, clip_range: tuple[float, float]) -> tuple[torch.Tensor, torch.Tensor]:
    """-min(w A, clip(w, low, high) A) per token with w = exp(log_ratio), and where the clip took the gradient away (0 or 1)."""
    low, high = clip_range
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    clipped = ((ratio > high) & (advantages > 0)) | ((ratio < low) & (advantages < 0))
    return loss, clipped.float()


def truncated_weight(old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, tis_clip: float) -> torch.Tensor:
    """min(p_old / p_rollout, tis_clip) per token, without gradient."""
    log_ratio = (old_logprobs - rollout_logprobs).detach()
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=tis_clip)


def policy_loss(terms: TokenTerms, settings: AlgorithmConfig) -> TokenLoss:
    """Policy loss + kl_loss_coef * KL(new || reference) - entropy_coef * entropy, per token.

    With use_tis and use_rollout_logprobs the truncated weight is the only correction: the ratio is taken against new_logprobs
    themselves (it is 1, its gradient that of log p), so nothing is clipped.
    """
    only_tis = settings.use_tis and settings.use_rollout_logprobs
    old = terms.new_logprobs.detach() if only_tis else terms.old_logprobs
    loss, clipped = clipped_loss(terms.new_logprobs - old, terms.advantages, (1.0 - settings.eps_clip, 1.0 + settings.eps_clip_high))
    measures = {"pg_clipfrac": clipped}
    if settings.use_tis:
        weight = truncated_weight(old, terms.rollout_logprobs, settings.tis_clip)
        loss = loss * weight
        measures |= {"tis": weight, "tis_clipfrac": (weight >= settings.tis_clip).float()}
    if settings.kl_loss_coef != 0.0:
        estimate = KL_ESTIMATORS[settings.kl_loss_type]
        divergence = estimate(terms.new_logprobs, terms.reference_logprobs)
        loss = loss + settings.kl_loss_coef * divergence
        measures["kl_loss"] = divergence.detach()
    if settings.entropy_coef != 0.0:
        loss = loss - settings.entropy_coef * terms.entropy
    return TokenLoss(loss, measures)

"""Estimators of KL(p || q) from one token of p: Schulman, "Approximating KL divergence" (2020). Shapes are those of the arguments."""

import torch

from trainer.objective.clip import LOG_RATIO_LIMIT, ratio_of


def k1(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, may be negative."""
    return logprobs - other_logprobs


def k2(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased, low variance, and its gradient is the KL's."""
    return 0.5 * (logprobs - other_logprobs).square()


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """q / p - 1 - log(q / p): unbiased and never negative."""
    log_ratio = (other_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio  # exp - 1 would be rounding alone below 1e-4


def kl_term(kind: str, new_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(new || reference) per token for a loss. `unbiased`: new / rollout * k3, with gradient through both factors; the samples are the
    rollout's, so its gradient is that of the KL. DeepSeek-V3.2 (2025), section 3.1, "Unbiased KL Estimate".
    """
    if kind == "unbiased":
        return ratio_of(new_logprobs - rollout_logprobs) * k3(new_logprobs, reference_logprobs)
    return KL_ESTIMATORS[kind](new_logprobs, reference_logprobs)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

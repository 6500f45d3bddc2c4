"""Estimators of KL(p || q) from one token of p: Schulman, "Approximating KL divergence" (2020). Shapes are those of the arguments."""

import torch

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8: beyond it a term is an outlier whose size carries nothing


def k1(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, may be negative."""
    return logprobs - other_logprobs


def k2(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased, low variance, and its gradient is the KL's."""
    return 0.5 * (logprobs - other_logprobs).square()


def k3(logprobs: torch.Tensor, other_logprobs: torch.Tensor) -> torch.Tensor:
    """q / p - 1 - log(q / p): unbiased and never negative."""
    log_ratio = (other_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp() - 1.0 - log_ratio


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}

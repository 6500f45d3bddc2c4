"""From a loss per token to one number."""

import torch


def masked_sum(values: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Sum over the tokens with mask 1. A masked token counts nothing even where its value is not finite."""
    return torch.where(loss_mask > 0, values, 0.0).sum()


def token_mean(values: torch.Tensor, loss_mask: torch.Tensor, num_tokens: float) -> torch.Tensor:
    """This part's share of the mean over all `num_tokens` trained tokens of the whole batch (every rank and micro-batch)."""
    return masked_sum(values, loss_mask) / num_tokens

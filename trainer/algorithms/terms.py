"""What a loss is computed from and what it gives, per token."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Everything known of each token of a row; all of one shape. Masked tokens hold anything finite."""

    new_logprobs: torch.Tensor
    """Of the model being trained, with gradient."""
    entropy: torch.Tensor
    """Of the model being trained; with gradient when the loss has an entropy term."""
    old_logprobs: torch.Tensor
    """What the ratio is taken against: the sampler's, or recomputed by the trainer before the update."""
    rollout_logprobs: torch.Tensor
    """The sampler's own."""
    reference_logprobs: torch.Tensor
    """Of the reference model; zeros when the loss has no KL term."""
    advantages: torch.Tensor
    """Per token."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A loss per token, and what to report of it."""

    loss: torch.Tensor
    """With gradient; the caller masks and averages it."""
    measures: dict[str, torch.Tensor]
    """By metric name, per token, without gradient; the caller masks and averages them."""

"""Supervised fine-tuning: the negative log-probability of the trained tokens."""

from trainer.algorithms.terms import TokenLoss, TokenTerms
from trainer.settings import AlgorithmSettings


def sft_loss(terms: TokenTerms, settings: AlgorithmSettings) -> TokenLoss:
    """-log p per token; advantages and rollout_logprobs are not read."""
    return TokenLoss(-terms.new_logprobs, {})

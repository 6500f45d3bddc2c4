"""Supervised fine-tuning: the negative log-probability of the trained tokens."""

from slimebus.cli.config.schema import AlgorithmConfig
from trainer.algorithms.terms import TokenLoss, TokenTerms


def sft_loss(terms: TokenTerms, settings: AlgorithmConfig) -> TokenLoss:
    """-log p per token; advantages and rollout_logprobs are not read."""
    return TokenLoss(-terms.new_logprobs, {})

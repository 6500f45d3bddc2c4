"""Advantages and losses: pure functions, one algorithm a file, found by name in these tables, and what each needs."""

from slimebus.cli.config.schema import AlgorithmConfig
from trainer.algorithms.grpo import grpo_advantages
from trainer.algorithms.policy import policy_loss
from trainer.algorithms.sft import sft_loss

ADVANTAGES = {"grpo": grpo_advantages}
LOSSES = {"policy_loss": policy_loss, "sft_loss": sft_loss}


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether reference_logprobs are part of the loss."""
    return algorithm.loss_type == "policy_loss" and algorithm.kl_loss_coef != 0.0


def needs_old_pass(algorithm: AlgorithmConfig) -> bool:
    """Whether old_logprobs are the trainer's own: a forward pass before the first of several optimizer steps on a batch."""
    return algorithm.loss_type == "policy_loss" and not algorithm.use_rollout_logprobs


def trains_without_advantage(algorithm: AlgorithmConfig) -> bool:
    """Whether a sample of advantage 0 still has a gradient, and so cannot be left out."""
    return algorithm.loss_type == "sft_loss" or algorithm.kl_loss_coef != 0.0 or algorithm.entropy_coef != 0.0

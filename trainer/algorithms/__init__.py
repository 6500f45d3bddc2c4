"""Advantages and losses: pure functions, one algorithm a file, found by name in these tables."""

from trainer.algorithms.grpo import grpo_advantages
from trainer.algorithms.policy import policy_loss
from trainer.algorithms.sft import sft_loss

ADVANTAGES = {"grpo": grpo_advantages}
LOSSES = {"policy_loss": policy_loss, "sft_loss": sft_loss}

"""PPO with a critic. Schulman et al., "Proximal Policy Optimization Algorithms" (2017); GAE: the same, "High-Dimensional Continuous
Control Using Generalized Advantage Estimation" (2016), eq. 16.
"""

from typing import Annotated

import numpy as np
from msgspec import Meta

from slimebus.bus.messages import NO_VERSION
from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.plugin import TokenLoss
from trainer.objective.returns import gae, token_rewards, whitened
from trainer.objective.row import Row


class Ppo(ClippedPolicyGradient):
    """The clipped loss with the generalized advantage estimates over the field `values`, which a critic gives for every token.

    The rewards of a sample are -kl_coef KL(old || reference) at each token, and r besides at the last.
    """

    class Settings(ClippedPolicyGradient.Settings, frozen=True):
        """Those of the clip, and of the advantages."""

        gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
        """[factor] What a reward one trained token later counts."""
        lambd: Annotated[float, Meta(ge=0, le=1)] = 1.0
        """[factor] Lambda of GAE: 1 weighs all later rewards (low bias), 0 only the next value (low variance)."""
        normalize_advantages: bool = True
        """[switch] Subtract the mean and divide by the deviation over all trained tokens of the batch."""
        value_clip: NonNegative = 0.2
        """[reward] The critic's values move in one batch by at most so much from those that the groups got when they came."""
        critic_lr: NonNegative = 0.0
        """[per step] Peak learning rate of the critic; 0: optimizer.lr."""
        num_critic_only_steps: Annotated[int, Meta(ge=0)] = 0
        """[steps] The policy rests so long at the start, while the critic learns."""

    settings: Settings

    def needs(self) -> set[str]:
        return {"values"}

    def advantages(self, batch: Batch) -> np.ndarray:
        if self.is_resting(batch):
            return np.zeros(batch.num_tokens)
        rewards = token_rewards(batch, self.config.algorithm)
        estimates, _ = gae(batch, rewards, batch.per_token("values"), gamma=self.settings.gamma, lambd=self.settings.lambd)
        return whitened(batch, estimates) if self.settings.normalize_advantages else estimates

    def learning_rate_factor(self, part: Batch) -> float:
        return 0.0 if self.is_resting(part) else 1.0  # terms of KL and entropy have a gradient even so

    def is_resting(self, batch: Batch) -> bool:
        """Whether only the critic learns from this batch: the version being trained, in steps, is below num_critic_only_steps."""
        version = int((batch["versions"] + batch["lag"])[batch["versions"] != NO_VERSION].max(initial=0))
        return version * self.config.weights.update_weights_interval < self.settings.num_critic_only_steps

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)

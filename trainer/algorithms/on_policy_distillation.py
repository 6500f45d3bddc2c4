"""On-policy distillation: a teacher judges each token that the student sampled. Agarwal et al., "On-Policy Distillation of Language Models"
(2024); Lu et al., "On-Policy Distillation" (Thinking Machines, 2025), the form of slime.
"""

from collections.abc import Iterator

import numpy as np

from slimebus.config.schema import NonNegative
from trainer.batches.batch import Batch
from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.group_rewards import group_normalised
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class OnPolicyDistillation(ClippedPolicyGradient):
    """The clipped loss with A = -opd_kl_coef (log p_old - log p_teacher) at each token, plus opd_reward_coef times GRPO's advantage.

    The first is minus one sample of the reverse KL(student || teacher), no later token counted. The field `teacher_logprobs` has one entry
    a token, at the temperature of the sample.
    """

    class Settings(ClippedPolicyGradient.Settings, frozen=True):
        """Those of the clip, and what the teacher and the reward count."""

        opd_kl_coef: NonNegative = 1.0
        """[weight] Of the teacher."""
        opd_reward_coef: NonNegative = 0.0
        """[weight] Of the reward, compared within its group; 0: the teacher alone."""

    settings: Settings

    @property
    def compares_groups(self) -> bool:  # type: ignore[override]
        return bool(self.settings.opd_reward_coef)

    def needs(self) -> set[str]:
        return {"teacher_logprobs"} | (set() if self.config.algorithm.use_rollout_logprobs else {"old_logprobs"})

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config.algorithm.kl_coef:
            yield "algorithm.kl_coef: on_policy_distillation has its own KL, to the teacher (opd_kl_coef); use kl_loss_coef for a reference"

    def advantages(self, batch: Batch) -> np.ndarray:
        old = batch["rollout_logprobs" if self.config.algorithm.use_rollout_logprobs else "old_logprobs"]
        is_trained = batch["loss_mask"] > 0  # elsewhere neither need be finite
        reverse_kl = np.subtract(old, batch.per_token("teacher_logprobs"), out=np.zeros(batch.num_tokens), where=is_trained)
        judged = -self.settings.opd_kl_coef * reverse_kl
        if not self.settings.opd_reward_coef:
            return judged
        return judged + self.settings.opd_reward_coef * group_normalised(batch, batch["reward"], std_normalization=True)

    def loss(self, row: Row) -> TokenLoss:
        outcome = clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)
        return TokenLoss(outcome.loss, {**outcome.measures, "opd_reverse_kl": row.old_logprobs - row["teacher_logprobs"]})

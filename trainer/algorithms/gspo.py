"""GSPO: the ratio of a whole sequence. Zheng et al., "Group Sequence Policy Optimization" (2025), eq. 5, 7 and 13 (GSPO-token)."""

from slimebus.config.schema import NonNegative
from trainer.algorithms.grpo import Grpo
from trainer.objective.clip import clipped_loss
from trainer.objective.plugin import Clip, TokenLoss
from trainer.objective.row import Row


class Gspo(Grpo):
    """The clipped loss of s_t = sg(s) p_new / sg(p_new), s = exp(mean over the sequence of log p_new - log p_old); mean over sequences.

    With one advantage for a sequence its value and gradient are those of the clipped loss of s, a geometric mean, which strays from 1 far
    less than the ratio of a token. The paper's range (section 5.1) is 3e-4 below and 4e-4 above, of a ratio to the trainer's own old
    policy. Against a sampler log s is minus the KL of its engine's error on average, 1e-4 to 1e-3 nats: the range here is ten times that.
    """

    aggregation = "sequence"
    needs_ratio = True

    class Settings(Grpo.Settings, frozen=True):
        """Those of GRPO."""

        eps_clip: NonNegative = 3e-3
        """[ratio] The importance ratio is clipped below at 1 - eps_clip."""

    settings: Settings

    @property
    def clip(self) -> Clip:
        return super().clip._replace(level="geometric")

    def loss(self, row: Row) -> TokenLoss:
        new = row.new_logprobs
        log_s = row.sequence_mean(new.detach() - row.old_logprobs) + (new - new.detach())
        return clipped_loss(log_s, row.advantages, self.clip, self.settings.eps_clip_c)

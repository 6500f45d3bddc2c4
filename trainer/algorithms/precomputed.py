"""Advantages that samples bring: an extra of a generate hook, or a late field (docs/consumers.md)."""

from collections.abc import Iterator

from trainer.objective.clip import ClippedPolicyGradient, clipped_loss
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class Precomputed(ClippedPolicyGradient):
    """The clipped loss with the field `advantages`, one a token or one a sample; a group without it is handed back."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.config.algorithm.kl_coef:
            yield (
                f"algorithm.kl_coef: {self.config.algorithm.kl_coef:g} is a part of rewards, and precomputed takes the advantages as the "
                "samples bring them; use kl_loss_coef"
            )

    def needs(self) -> set[str]:
        return {"advantages"}

    def loss(self, row: Row) -> TokenLoss:
        return clipped_loss(row.new_logprobs - row.old_logprobs, row.advantages, self.clip, self.settings.eps_clip_c)

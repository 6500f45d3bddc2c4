"""Advantages that samples bring: an extra of a generate hook, or a late field (docs/consumers.md)."""

from trainer.objective.clipped import ClippedPolicyGradient


class Precomputed(ClippedPolicyGradient):
    """The clipped loss with the field `advantages`, one a token or one a sample; a group without it is handed back."""

    def needs(self) -> set[str]:
        return {"advantages"}

"""DPPO with a KL term: prime-rl's default loss (PrimeIntellect, src/prime_rl/trainer/rl/loss.py and configs, August 2026)."""

from slimebus.config.schema import Fraction, NonNegative
from trainer.objective.clip import ratio_of
from trainer.objective.group_rewards import MeanBaseline
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import Row


class Dppo(MeanBaseline):
    """-keep w A + dppo_kl d^2 per token, A = r - mean, w = p_new / p_rollout, d = log w; keep = 0 where the probability has already moved
    far enough: A > 0 and p_new - p_rollout > dppo_high, or A < 0 and p_new - p_rollout < -dppo_low.

    Differences of probabilities, not ratios: a token with p_rollout < dppo_low is never masked from below. The ratio has no cap, as in
    prime-rl's code (its documentation has one). The denominator keeps what is masked. Trained without advantage for the d^2.
    """

    compares_with = "rollout"
    trains_without_advantage = True

    class Settings(MeanBaseline.Settings, frozen=True):
        """Of the mask and the KL term."""

        dppo_low: Fraction = 0.2
        """[probability] Largest fall of a bad token's probability."""
        dppo_high: Fraction = 0.2
        """[probability] Largest rise of a good token's probability."""
        dppo_kl: NonNegative = 1e-3
        """[weight] Of d^2."""

    settings: Settings

    def loss(self, row: Row) -> TokenLoss:
        d, a = row.new_logprobs - row.rollout_logprobs, row.advantages
        moved = (row.new_logprobs.exp() - row.rollout_logprobs.exp()).detach()
        is_out = ((a > 0) & (moved > self.settings.dppo_high)) | ((a < 0) & (moved < -self.settings.dppo_low))
        loss = (~is_out) * -ratio_of(d) * a + self.settings.dppo_kl * d.square()
        return TokenLoss(loss, {"dppo_dropped": is_out.float()})

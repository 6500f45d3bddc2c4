"""Dr. GRPO: GRPO without its two biases. Liu et al., "Understanding R1-Zero-Like Training" (2025), section 3.2."""

from trainer.algorithms.grpo import Grpo


class DrGrpo(Grpo):
    """The clipped loss with A = r - mean, summed and divided by trajectories x rollout_max_response_len."""

    aggregation = "constant"

    class Settings(Grpo.Settings, frozen=True):
        """Those of GRPO."""

        grpo_std_normalization: bool = False
        """[switch] Divide a group's advantages by its standard deviation."""

    settings: Settings

"""Flags of slime, verl and TRL that have another name here; docs/algorithms.md has the same table."""

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    "adv-estimator": "--advantage-estimator",
    "clip-ratio": "--eps-clip",
    "clip-ratio-high": "--eps-clip-high",
    "clip-ratio-low": "--eps-clip",
    "entropy-coeff": "--entropy-coef",
    "grad-clip": "--clip-grad",
    "lam": "--lambd",
    "learning-rate": "--lr",
    "loss-agg-mode": "--loss-aggregation",
    "max-response-length": "--rollout-max-response-len",
    "max-steps": "--num-rollout",
    "num-generations": "--n-samples-per-prompt",
    "ppo-epochs": "--num-steps-per-rollout",
    "ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "save-freq": "--save-interval",
    "temperature": "--rollout-temperature",
    "test-freq": "--eval-interval",
    "total-epochs": "--num-epoch",
    "train-batch-size": "--rollout-batch-size",
    "use-kl-loss": "--kl-loss-coef",
    "use-opd": "--advantage-estimator on_policy_distillation",
    "use-opsm": "--corrections opsm",
    "use-tis": "--corrections tis",
    "warmup-steps": "--lr-warmup-iters",
}
"""Their flag without dashes -> what to write here."""

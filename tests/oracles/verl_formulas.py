"""verl's formulas on given numbers: JSON of test_formulas.py on stdin, JSON on stdout. In a process of its own, with the wheel on its path.

B sequences   T tokens, masked ones among them
"""

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

from absent_packages import stand_in

stand_in("ray", "tensordict", "omegaconf", "hydra", "codetiming", "pandas", "peft", "datasets", "dill", "torchdata", "accelerate")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from verl.trainer.ppo import core_algos as algos  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper as correction  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402


def loss_of(given: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """A policy loss, its correction and its KL term, and its gradient by the new logprobs.

    case: policy, low, high, c of the clip; weights, threshold, normalise: of compute_rollout_correction_weights; reject, bounds: of the
    rejection of samples, which here is a weight, as no denominator changes; kl, coef; mode, scale of the aggregation.
    """
    new = given["new"].clone().requires_grad_()
    old, rollout, mask = (given[name] for name in ("old", "rollout", "mask"))
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_c=case.get("c", 1e9),
        clip_ratio_low=case.get("low", 0.2), clip_ratio_high=case.get("high", 0.2),
    )  # fmt: skip
    mode, weights = case.get("mode", "token-mean"), None
    config.global_batch_info["loss_scale_factor"] = case.get("scale")
    if "weights" in case:
        options = {"rollout_is": case["weights"], "rollout_is_threshold": case["threshold"]}
        normalise = case.get("normalise", False)
        weights, _ = correction.compute_rollout_correction_weights(old - rollout, mask, **options, rollout_is_batch_normalize=normalise)
    if "reject" in case:
        weights, _ = correction.compute_rollout_rejection_mask((new - rollout).detach(), mask, case["reject"], case["bounds"])
    policy = algos.get_policy_loss_fn(case.get("policy", "vanilla"))
    loss, _ = policy(old, new, given["advantages"][:, None] * mask, mask, mode, config, weights)
    if "kl" in case:
        loss = loss + case["coef"] * algos.agg_loss(algos.kl_penalty(new, given["reference"], case["kl"]), mask, mode)
    loss.backward()
    return {"loss": loss.item(), "gradient": new.grad.tolist()}


def advantages_of(given: dict[str, Any], case: dict[str, Any]) -> list[list[float]]:
    """Of an estimator, [B, T]; rewards of tokens as in verl: the sample's at its last one, less coef times the KL of old and reference."""
    mask, rewards = given["mask"], torch.zeros_like(given["mask"])
    for row, reward in enumerate(given["rewards"]):
        rewards[row, int(mask[row].nonzero().max()) if mask[row].any() else -1] = reward
    if "kl" in case:
        rewards = rewards - case["coef"] * algos.kl_penalty(given["old"], given["reference"], case["kl"]) * mask
    if case["estimator"] == "gae":
        return algos.compute_gae_advantage_return(rewards, given["values"], mask, case["gamma"], case["lambd"])[case["which"]].tolist()
    options = {"norm_adv_by_std_in_grpo": case["std"]} if "std" in case else {"config": SimpleNamespace(gamma=case.get("gamma", 1.0))}
    if case["estimator"] != "reinforce_plus_plus":
        options["index"] = np.array(given["groups"])
    return algos.get_adv_estimator_fn(case["estimator"])(token_level_rewards=rewards, response_mask=mask, **options)[0].tolist()


def value_loss_of(given: dict[str, Any], case: dict[str, Any]) -> dict[str, Any]:
    """The critic's, with `new` as its values and `old` as those of before."""
    new = given["new"].clone().requires_grad_()
    loss, _ = algos.compute_value_loss(new, given["returns"], given["old"], given["mask"], case["clip"])
    loss.backward()
    return {"loss": loss.item(), "gradient": new.grad.tolist()}


def metrics_of(given: dict[str, Any], case: dict[str, Any]) -> dict[str, float]:
    """How far the policy is from the sampler."""
    found = correction.compute_offpolicy_metrics(given["new"], given["rollout"], given["mask"])
    _, of_weights = correction.compute_rollout_correction_weights(given["new"] - given["rollout"], given["mask"], "token", 1e9)
    return {
        "kl_k1": found["kl"],
        "kl_k3": found["k3_kl"],
        "chi2": found["chi2_token"],
        "ess_token": of_weights["rollout_is_eff_sample_size"],
    }


KINDS = {"loss": loss_of, "advantages": advantages_of, "value loss": value_loss_of, "metrics": metrics_of}


def main() -> None:
    """Answer each case on each set of numbers."""
    asked = json.load(sys.stdin)
    answers = []
    with contextlib.redirect_stdout(sys.stderr):
        for numbers in asked["numbers"]:
            given = {name: torch.tensor(values, dtype=torch.float64) if name != "groups" else values for name, values in numbers.items()}
            answers.append({name: KINDS[case["kind"]](given, case) for name, case in asked["cases"].items()})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()

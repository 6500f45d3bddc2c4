"""What in a config contradicts its algorithm and corrections, a sentence each: the field, its value, why, the remedy."""

from collections.abc import Iterator

from trainer.objective.aggregation import AGGREGATIONS
from trainer.objective.objective import Objective, named

NEUTRAL = {"min_p": (0,), "repetition_penalty": (1,), "frequency_penalty": (0,), "presence_penalty": (0,), "regex": ("",)}
NEUTRAL |= {"json_schema": ("",), "ebnf": ("",)}
"""Of rollout.sampling_params, what changes the distribution that tokens are drawn from, and the values that do not."""
NOISE = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps")
"""Megatron's options with which two forward passes of the same weights differ."""


def objective_problems(objective: Objective) -> Iterator[str]:
    """All of them."""
    a, algorithm = objective.settings, objective.algorithm
    yield from (problem for plugin in objective.plugins for problem in plugin.problems())
    if algorithm.aggregation not in AGGREGATIONS:
        yield f"{named(algorithm)}: aggregation {algorithm.aggregation!r}; expected one of {', '.join(AGGREGATIONS)}"
    if a.kl_coef and a.kl_loss_coef:
        yield f"algorithm.kl_coef: {a.kl_coef:g} puts the KL in the reward, and kl_loss_coef {a.kl_loss_coef:g} in the loss; keep one"
    if a.kl_coef and a.kl_loss_type == "unbiased":
        yield "algorithm.kl_loss_type: unbiased is a term of the loss and has no meaning in the reward (kl_coef); choose k1, k2 or k3"
    if a.kl_loss_type == "k1" and a.kl_loss_coef:
        why = "the gradient of k1 in the loss has no reference in it and is 0 in mean, so it holds nothing"
        yield f"algorithm.kl_loss_type: {why}; take k2, k3 (the default) or unbiased, or put the KL in the reward (kl_coef)"
    if a.kl_loss_type and not a.kl_coef and not a.kl_loss_coef:
        yield f"algorithm.kl_loss_type: {a.kl_loss_type} of a KL with coefficient 0; set kl_loss_coef or kl_coef, or remove it"
    if a.ref_update_interval and not objective.needs_pass("reference_logprobs"):
        why = "no reference model is held: nothing reads it (kl_loss_coef and kl_coef are 0), or a consumer puts its logprobs"
        yield f"algorithm.ref_update_interval: {a.ref_update_interval}, but {why}; remove it"
    yield from demonstration_problems(objective) if algorithm.is_supervised else sampling_problems(objective)


def demonstration_problems(objective: Objective) -> Iterator[str]:
    """What has no meaning where no policy sampled."""
    a = objective.settings
    unmeant = {"corrections": a.corrections, "kl_coef": a.kl_coef, "kl_loss_type": a.kl_loss_type == "unbiased" and "unbiased"}
    for name, value in unmeant.items():
        if value:
            yield (
                f"algorithm.{name}: {value}, but {a.advantage_estimator} trains on demonstrations, which have no rewards and no logprobs "
                "of a sampler; remove it"
            )


def sampling_problems(objective: Objective) -> Iterator[str]:
    """What contradicts samples of a policy."""
    for key, value in objective.config.megatron.items():
        if key.replace("-", "_") in NOISE and value and value != "none":
            why = "only sft trains with noise; the ratio of new to old logprobs, and the clip, would measure it"
            yield f"megatron.{key}: {value}, but {why}. Leave it out"
    yield from importance_weight_problems(objective)
    yield from top_p_and_top_k_problems(objective)


def importance_weight_problems(objective: Objective) -> Iterator[str]:
    """What contradicts the corrections that weigh old against the sampler, and what has no effect where the ratio to old is 1."""
    a, algorithm = objective.settings, objective.algorithm
    weights = [name for name, c in zip(a.corrections, objective.corrections, strict=True) if c.is_importance_weight]
    weighing = [a.advantage_estimator, *weights] if algorithm.compares_with == "rollout" else weights
    if len(weighing) > 1:
        yield (
            f"algorithm.corrections: {' and '.join(weighing)} each weigh the same tokens by their ratio to the sampler, and their "
            "product would count it more than once; keep one of them (masks such as opsm and trm go with any)"
        )
    if weights and a.use_rollout_logprobs:
        why = f"with use_rollout_logprobs: true the weight of {weights[0]} stands in the place of the ratio, which is 1"
        remedy = (
            f"set use_rollout_logprobs: false and rollout.num_steps_per_rollout or num_passes_per_rollout above 1, or remove {weights[0]}"
        )
    elif objective.old_is_of_the_training_pass:
        why = "with use_rollout_logprobs: false and one optimizer step on a batch old is the policy being trained, so the ratio is 1"
        remedy = "set rollout.num_steps_per_rollout or num_passes_per_rollout above 1, or use_rollout_logprobs: true"
    else:
        return
    if algorithm.needs_ratio:
        yield f"algorithm.advantage_estimator: {a.advantage_estimator} is its ratio, but {why}; {remedy}"
    for name in (name for name in a.settings if name.startswith("eps_clip") and algorithm.clip):
        yield f"algorithm.settings.{name}: no effect: {why}, and nothing is clipped; {remedy}, or leave it out"


def top_p_and_top_k_problems(objective: Objective) -> Iterator[str]:
    """What draws tokens from another distribution than that of the rollout logprobs, where these are read."""
    a, r = objective.settings, objective.config.rollout
    reads = objective.corrections or objective.algorithm.compares_with == "rollout" or a.use_rollout_logprobs
    if not (reads or (a.kl_loss_coef and a.kl_loss_type == "unbiased")):
        return
    cut = {"rollout_top_p": r.rollout_top_p} if r.rollout_top_p < 1 else {}
    cut |= {"rollout_top_k": r.rollout_top_k} if r.rollout_top_k > 0 else {}
    cut |= {f"sampling_params.{name}": value for name, value in r.sampling_params.items() if value not in NEUTRAL.get(name, (value,))}
    for name, value in cut.items():
        yield (
            f"rollout.{name}: {value} cuts the distribution that tokens are drawn from, but rollout logprobs are those of the whole "
            "one, so every importance ratio would be wrong; remove it, or set algorithm.use_rollout_logprobs: false without corrections"
        )

"""What is wrong with a run's Megatron options and layout, found before any rank starts. Only Megatron's own checks need torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from slimebus.bus.errors import ConfigError
from slimebus.cli.config import Resolved, RunConfig
from slimebus.model_folder import read_config
from trainer.arguments.megatron_checks import megatron_refusal
from trainer.arguments.option_table import option_table, said_by
from trainer.arguments.options import MegatronOptions, read_options, shown
from trainer.model.families import ALWAYS, check_features, family_of

OF_SOME_MODELS = ("num_moe", "moe_", "q_lora", "kv_lora", "qk_", "v_head")
"""Of the names in `config_keys`, those that not every model's config.json says something of."""


def megatron_problems(resolved: Resolved) -> list[str]:
    """A sentence for each option that is unknown, wrong, decided elsewhere, or contradicts another, the layout or the model folder."""
    config, options = resolved.config, read_options(resolved.config.megatron)
    shape = shape_of(resolved)
    looks = (_contradicts_model, _experts, _noise, _pipeline, _recompute)
    for look in looks:
        for name, text in look(options, config, shape):
            options.problems.setdefault(options.places.get(name, name), text)
    found = [f"{_place(resolved, key)}: megatron.{key}: {text}" for key, text in options.problems.items()]
    if not found and shape and options.values and (refusal := megatron_refusal(config, shape)):
        found.append(f"megatron: {refusal} (Megatron's own check of {', '.join(sorted(options.places.values()))} in this layout)")
    return found


def model_problems(resolved: Resolved) -> list[str]:
    """Why the trainer refuses the model folder: a family that is not verified, or what has no map in one that is. No folder: nothing."""
    try:
        raw = read_config(resolved.model_dir)
    except ConfigError:
        return []
    if "model_type" not in raw:  # of a folder that is not made yet
        return []
    try:
        family = family_of(str(raw.get("model_type")), resolved.config.model.family)
        check_features(family, as_transformers(family, raw))
    except ConfigError as bad:
        return [f"model.hf_checkpoint: {resolved.model_dir}: {bad.text}"]
    return []


def as_transformers(family: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the defaults of transformers that `check_features` looks at, and rope's settings under their name there."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    defaults: dict[str, Any] = {"use_sliding_window": False} if family.startswith("qwen") else {"num_experts_per_tok": 8}
    return {**defaults, **raw, "rope_parameters": rope}


def shape_of(resolved: Resolved) -> dict[str, Any]:
    """What config.json says of the model, by Megatron's names; empty where there is no model folder."""
    try:
        tree = read_config(resolved.model_dir)
    except ConfigError:
        return {}
    text = tree.get("text_config") or tree
    text = text | {key: value for key, value in (text.get("rope_parameters") or {}).items() if key not in text}
    said = said_by(text) | ALWAYS
    said |= {"position_embedding_type": "rope", "use_rotary_position_embeddings": True}
    if said.get("num_query_groups") and said.get("num_attention_heads"):
        said["group_query_attention"] = said["num_query_groups"] < said["num_attention_heads"]
    if "tie_word_embeddings" in tree:
        said["untie_embeddings_and_output_weights"] = not tree["tie_word_embeddings"]
    return said


def _place(resolved: Resolved, key: str) -> str:
    return resolved.origin.get(f"megatron.{key}", "config")


Found = Iterator[tuple[str, str]]


def _contradicts_model(options: MegatronOptions, config: RunConfig, shape: dict[str, Any]) -> Found:
    for name, value in options.model.items():
        if name in shape and shape[name] != value:
            yield name, contradiction_text(value, shape[name])
        elif shape and name not in shape and name in option_table().config_keys and name.startswith(OF_SOME_MODELS):
            yield name, f"{shown(value)}, but the model's config.json has nothing of the kind; the model folder decides, leave it out"


def contradiction_text(given: Any, actual: Any) -> str:
    """The sentence about a model option that the model folder contradicts."""
    return f"{shown(given)}, but the model folder's config.json makes it {shown(actual)}, and decides; leave it out"


def _experts(options: MegatronOptions, config: RunConfig, shape: dict[str, Any]) -> Found:
    experts, size = shape.get("num_moe_experts"), options.values.get("expert_model_parallel_size") or 1
    if not shape:
        return
    if experts is None:
        for name in options.values:
            is_of_experts = name.startswith(("expert_", "moe_")) and name != "moe_token_dispatcher_type"  # which pipelines need too
            if is_of_experts and options.values[name] not in (1, None, False):
                yield name, f"{shown(options.values[name])}, but the model has no experts (config.json); leave it out"
        return
    if experts % size:
        yield "expert_model_parallel_size", f"{size} does not divide the model's {experts} experts"
    if config.trainer.tensor_model_parallel_size > 1 and not config.trainer.sequence_parallel:
        yield "expert_model_parallel_size", "experts with tensor parallelism need trainer.sequence_parallel: true"


def _noise(options: MegatronOptions, config: RunConfig, shape: dict[str, Any]) -> Found:
    if not (config.algorithm.is_supervised or ":" in config.algorithm.advantage_estimator):  # what a class of the user's is, it says itself
        yield from noise(options)


def noise(options: MegatronOptions) -> Found:
    """The options that only an algorithm that is supervised may have."""
    for name in ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps"):
        if options.values.get(name):
            text = "only sft trains with noise; the ratio of new to old logprobs, and the clip, would measure it. Leave it out"
            yield name, f"{shown(options.values[name])}, but {text}"


def _pipeline(options: MegatronOptions, config: RunConfig, shape: dict[str, Any]) -> Found:
    if config.trainer.pipeline_model_parallel_size > 1:
        return
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"):
        if options.values.get(name) is not None:
            yield name, "there is one pipeline stage; set trainer.pipeline_model_parallel_size"


def _recompute(options: MegatronOptions, config: RunConfig, shape: dict[str, Any]) -> Found:
    given = options.values.get("recompute_granularity")
    if given == "selective" and options.values.get("recompute_method"):
        yield "recompute_method", "recompute_granularity selective recomputes its modules in every layer; leave it out"
    if given == "full" and options.values.get("recompute_modules"):
        yield "recompute_modules", "recompute_granularity full recomputes whole layers; leave it out, or set selective"


def expert_ranks(config: RunConfig) -> tuple[int, int]:
    """Expert parallel and expert tensor parallel size: 1 unless given, also where tensor parallelism is not."""
    values = read_options(config.megatron).values
    return values.get("expert_model_parallel_size") or 1, values.get("expert_tensor_parallel_size") or 1


def check_layout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless the ranks divide by tensor x pipeline x context, and by expert tensor x pipeline x expert."""
    t = config.trainer
    pipeline, (experts, expert_tensor) = t.pipeline_model_parallel_size, expert_ranks(config)
    inner = {
        "context": (t.tensor_model_parallel_size, t.context_parallel_size),
        "expert": (expert_tensor, experts),
    }
    for kind, (tensor, size) in inner.items():
        ranks = tensor * pipeline * size
        if world_size % ranks:
            split = {"tensor": t.tensor_model_parallel_size, "expert tensor": expert_tensor if kind == "expert" else 1}
            split |= {"pipeline": pipeline, kind: size}
            above_1 = " or ".join(name for name, of in split.items() if of > 1 and (name, kind) != ("tensor", "expert"))
            raise ConfigError(
                f"{world_size} trainer ranks do not divide by {ranks} = tensor {tensor} x pipeline {pipeline} x {kind} {size};"
                f" start a multiple of {ranks} (--nproc-per-node, --nnodes), or lower {above_1} parallelism"
            )

"""The model families that may be trained, and what of each is not mapped. No torch: docs/models.md is held against this file.

A family is verified when tests/trainer/hf/test_families.py holds its logits against transformers and its weights bit for bit.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from slimebus.bus.errors import ConfigError

VERIFIED = {
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "llama": "llama",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
}
"""model_type of config.json to the family whose map it uses."""
WRONG = {
    "mixtral": "its router was measured to give other logits (off by 1.3)",
    "qwen2_moe": "the gate of its shared expert has no map (logits off by 1.6)",
}
"""Types that look like a verified family and were measured wrong."""

ALWAYS = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
"""What of TransformerConfig is the same in every family that is mapped."""
WITH_ATTENTION_BIAS = ("glm4", "glm4_moe")
"""attention_bias may be true; it then means a bias on queries, keys and values. Qwen2 always has one, the others none."""
ROPE_TYPES = {"llama": ("default", "llama3"), "deepseek_v3": ("default", "yarn")}
PARTLY_ROTATED = ("glm4", "glm4_moe")
"""partial_rotary_factor says which share of a head is turned; transformers turns all of it in the others, whatever their config says."""
SIGMOID_ROUTED = ("glm4_moe", "deepseek_v3")


def family_of(model_type: str, treat_as: str = "") -> str:
    """The family whose map a model of this type uses; treat_as: `model.family`, which chooses it for a type that is not verified.

    Raises ConfigError for a type that is not verified without treat_as, and for one measured wrong even with it.
    """
    if model_type in VERIFIED:
        return VERIFIED[model_type]
    known = ", ".join(VERIFIED)
    if model_type in WRONG:
        raise ConfigError(f"model_type {model_type!r} cannot be trained: {WRONG[model_type]}; verified are {known}")
    if not treat_as:
        raise ConfigError(
            f"model_type {model_type!r} is not verified; verified are {known}. If it has the architecture of one of them, "
            f"`model.family: {next(iter(VERIFIED))}` (say) trains it as that one, at your own risk"
        )
    if treat_as not in VERIFIED:
        raise ConfigError(f"model.family: no family {treat_as!r}; there are {known}")
    return VERIFIED[treat_as]


def check_features(family: str, config: Mapping[str, Any]) -> None:
    """Raise ConfigError that names each feature of a model's config (transformers' defaults filled in) that its family's map has not."""
    if problems := list(unmapped_features(family, config)):
        raise ConfigError(f"config.json: this {family} cannot be trained: {'; '.join(problems)}")


def unmapped_features(family: str, config: Mapping[str, Any]) -> Iterator[str]:
    """A clause for each."""
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown")
        yield f"its weights are quantised ({method}); convert them to bfloat16 first"
    if config.get("hidden_act", "silu") != "silu":
        yield f"hidden_act is {config['hidden_act']!r}, and only silu is mapped"
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()) or has_window(config):
        yield "it has sliding-window attention, and only full attention is mapped (use_sliding_window: false, if the model allows it)"
    if config.get("attention_bias") and family not in WITH_ATTENTION_BIAS:
        yield "attention_bias is true, and its biases are not mapped"
    if config.get("mlp_bias"):
        yield "mlp_bias is true, and its biases are not mapped"
    yield from unmapped_rope(family, config)
    if family == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        yield "some of its layers are dense (mlp_only_layers, decoder_sparse_step), and only experts in every layer are mapped"
    if family == "qwen3_moe" and config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob"):
        yield "it chooses one expert a token and normalises its weight, so its router has no effect (num_experts_per_tok, norm_topk_prob)"
    if family in SIGMOID_ROUTED:
        yield from unmapped_routing(config)


def has_window(config: Mapping[str, Any]) -> bool:
    """Whether a window applies: families that know use_sliding_window or layer_types keep a size that is not used."""
    return bool(config.get("sliding_window")) and "use_sliding_window" not in config and not config.get("layer_types")


def unmapped_rope(family: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Rotary embeddings; transformers 5 gathers their settings in rope_parameters."""
    rope, mapped = config.get("rope_parameters") or {}, ROPE_TYPES.get(family, ("default",))
    kind = rope.get("rope_type", "default")
    if kind not in mapped:
        yield f"rope_type is {kind!r}, and only {' and '.join(mapped)} are mapped"
    elif kind == "yarn" and not (rope.get("factor") and rope.get("mscale") and rope.get("mscale_all_dim")):
        yield "its yarn scaling lacks factor, mscale or mscale_all_dim"
    elif kind == "yarn" and rope.get("attention_factor") is not None:
        yield "its yarn scaling has attention_factor, which is not mapped"
    share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and family not in PARTLY_ROTATED:
        yield f"partial_rotary_factor is {share}, and only whole heads are mapped"
    if config.get("rope_interleave") is False:
        yield "rope_interleave is false, which is not mapped"


def unmapped_routing(config: Mapping[str, Any]) -> Iterator[str]:
    """DeepSeek-V3's routing (arXiv:2412.19437, eq. 12-16): sigmoid scores, groups by the sum of their two best, normalised weights."""
    for name, mapped in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1), ("norm_topk_prob", True)):
        if config.get(name, mapped) != mapped:
            yield f"{name} is {config[name]!r}, and only {mapped!r} is mapped"
    groups, chosen, topk = (config.get(name) or 1 for name in ("n_group", "topk_group", "num_experts_per_tok"))
    if topk < 2:
        yield "it chooses one expert a token, whose weight megatron does not normalise"
    if groups > 1 and topk // chosen != 2:
        yield f"num_experts_per_tok {topk} is not twice topk_group {chosen}: megatron would score its groups otherwise"

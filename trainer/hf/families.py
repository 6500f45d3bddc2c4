"""The model families that may be trained: one class each, which says what its config.json means to Megatron and what of it is not mapped.

A family is verified when tests/trainer/hf/test_families.py holds its logits against transformers and its weights bit for bit. To add one:
its class and its row of VERIFIED here, its tiny model in tests/fixtures/model_families.py, its row of docs/models.md. No torch here.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from slimebus.bus.errors import ConfigError

CONFIG_KEYS: dict[str, tuple[str, ...]] = {
    **{
        name: (name,)
        for name in (
            "hidden_size",
            "num_attention_heads",
            "q_lora_rank",
            "kv_lora_rank",
            "v_head_dim",
            "vocab_size",
            "max_position_embeddings",
        )
    },
    "num_layers": ("num_hidden_layers",),
    "num_query_groups": ("num_key_value_heads",),
    "ffn_hidden_size": ("intermediate_size",),
    "kv_channels": ("head_dim",),
    "layernorm_epsilon": ("rms_norm_eps",),
    "num_moe_experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
    ),
    "moe_ffn_hidden_size": ("moe_intermediate_size",),
    "moe_router_topk": ("num_experts_per_tok",),
    "moe_router_num_groups": ("n_group",),
    "moe_router_group_topk": ("topk_group",),
    "moe_router_topk_scaling_factor": ("routed_scaling_factor",),
    "qk_head_dim": ("qk_nope_head_dim",),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim",),
    "rotary_base": ("rope_theta",),
    "rotary_percent": ("partial_rotary_factor",),
}
"""Megatron's name -> the keys of a Hugging Face config.json that say the same."""
ALWAYS = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
"""What of TransformerConfig is the same in every family that is mapped."""
EXPERTS = {"moe_router_load_balancing_type": "none", "moe_grouped_gemm": True, "moe_router_dtype": "fp32"}
"""Of every mixture of experts. Reinforcement learning keeps the routing: no balancing loss, and scores in fp32 as in engines."""


def megatron_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a Hugging Face config says under one of CONFIG_KEYS, by Megatron's names."""
    found = {name: [config[key] for key in keys if config.get(key) is not None] for name, keys in CONFIG_KEYS.items()}
    return {name: values[0] for name, values in found.items() if values}


class Family:
    """What all have in common. `config` is transformers' in `fields`, a mapping of its values (defaults filled in) elsewhere."""

    name: ClassVar[str]
    """transformers' model_type."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Of transformers' config, what `unmapped` reads and config.json may leave out."""
    rope_types: ClassVar[tuple[str, ...]] = ("default",)
    may_have_bias: ClassVar[bool] = False
    """attention_bias may be true; it then means a bias on queries, keys and values."""
    may_rotate_part: ClassVar[bool] = False
    """partial_rotary_factor says which share of a head is turned; transformers turns all of it in the others."""
    is_glm4: ClassVar[bool] = False
    """Gate and up are one tensor, the rotary embedding turns neighbours and not halves, and attention and MLP end with a norm each."""

    def fields(self, config: Any) -> dict[str, Any]:
        """TransformerConfig's fields beside those that all families have."""
        return {}

    def unmapped(self, config: Mapping[str, Any]) -> Iterator[str]:
        """A clause for each feature that only this family could have and that is not mapped."""
        return iter(())

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise ConfigError that names each feature of a model's config that is not mapped."""
        if problems := [*self._unmapped_anywhere(config), *self.unmapped(config)]:
            raise ConfigError(f"config.json: this {self.name} cannot be trained: {'; '.join(problems)}")

    def _unmapped_anywhere(self, config: Mapping[str, Any]) -> Iterator[str]:
        if quantised := config.get("quantization_config"):
            method = quantised.get("quant_method", "unknown")
            yield f"its weights are quantised ({method}); convert them to bfloat16 first"
        if config.get("hidden_act", "silu") != "silu":
            yield f"hidden_act is {config['hidden_act']!r}, and only silu is mapped"
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()) or has_window(config):
            yield "it has sliding-window attention, and only full attention is mapped (use_sliding_window: false, if the model allows it)"
        if config.get("attention_bias") and not self.may_have_bias:
            yield "attention_bias is true, and its biases are not mapped"
        if config.get("mlp_bias"):
            yield "mlp_bias is true, and its biases are not mapped"
        rope = config.get("rope_parameters") or {}  # where transformers 5 gathers the settings of the rotary embedding
        kind = rope.get("rope_type", "default")
        if kind not in self.rope_types:
            yield f"rope_type is {kind!r}, and only {' and '.join(self.rope_types)} are mapped"
        elif kind == "yarn" and not (rope.get("factor") and rope.get("mscale") and rope.get("mscale_all_dim")):
            yield "its yarn scaling lacks factor, mscale or mscale_all_dim"
        elif kind == "yarn" and rope.get("attention_factor") is not None:
            yield "its yarn scaling has attention_factor, which is not mapped"
        share = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
        if share != 1.0 and not self.may_rotate_part:
            yield f"partial_rotary_factor is {share}, and only whole heads are mapped"
        if config.get("rope_interleave") is False:
            yield "rope_interleave is false, which is not mapped"


def has_window(config: Mapping[str, Any]) -> bool:
    """Whether a window applies: families that know use_sliding_window or layer_types keep a size that is not used."""
    return bool(config.get("sliding_window")) and "use_sliding_window" not in config and not config.get("layer_types")


class Qwen2(Family):
    """Qwen2.5; queries, keys and values always have a bias."""

    name, defaults = "qwen2", {"use_sliding_window": False}

    def fields(self, config: Any) -> dict[str, Any]:
        return {"add_qkv_bias": True}


class Qwen3(Family):
    """Queries and keys are normalised."""

    name, defaults = "qwen3", {"use_sliding_window": False}

    def fields(self, config: Any) -> dict[str, Any]:
        return {"qk_layernorm": True}


class Qwen3Moe(Family):
    """Softmax over the chosen experts, or over all of them before they are chosen, which does not normalise."""

    name, defaults = "qwen3_moe", {"use_sliding_window": False}

    def fields(self, config: Any) -> dict[str, Any]:
        softmax = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not config.norm_topk_prob}
        return {"qk_layernorm": True, **EXPERTS, **softmax}

    def unmapped(self, config: Mapping[str, Any]) -> Iterator[str]:
        if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
            yield "some of its layers are dense (mlp_only_layers, decoder_sparse_step), and only experts in every layer are mapped"
        if config.get("num_experts_per_tok") == 1 and config.get("norm_topk_prob"):
            what = "num_experts_per_tok, norm_topk_prob"
            yield f"it chooses one expert a token and normalises its weight, so its router has no effect ({what})"


class Llama(Family):
    """Llama 3."""

    name, rope_types = "llama", ("default", "llama3")


class Glm4(Family):
    """GLM-4-0414."""

    name, may_have_bias, may_rotate_part, is_glm4 = "glm4", True, True, True


class SigmoidRouted(Family):
    """Routing without a loss (arXiv:2408.15664) by sigmoid scores, groups by the sum of their two best, normalised weights
    (arXiv:2412.19437, eq. 12-16). A bias decides the choice alone; training moves it only where moe_router_bias_update_rate says so.
    """

    defaults: ClassVar[Mapping[str, Any]] = {"num_experts_per_tok": 8}

    def fields(self, config: Any) -> dict[str, Any]:
        dense = min(config.first_k_dense_replace, config.num_hidden_layers)
        ungrouped = {} if (config.n_group or 1) > 1 else {"moe_router_num_groups": None, "moe_router_group_topk": None}
        return {
            "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
            "moe_router_score_function": "sigmoid",
            "moe_router_pre_softmax": True,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts or None,
            **EXPERTS,
            **ungrouped,
        }

    def unmapped(self, config: Mapping[str, Any]) -> Iterator[str]:
        for name, mapped in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1), ("norm_topk_prob", True)):
            if config.get(name, mapped) != mapped:
                yield f"{name} is {config[name]!r}, and only {mapped!r} is mapped"
        groups, chosen, topk = (config.get(name) or 1 for name in ("n_group", "topk_group", "num_experts_per_tok"))
        if topk < 2:
            yield "it chooses one expert a token, and megatron does not normalise its weight"
        if groups > 1 and topk // chosen != 2:
            yield f"num_experts_per_tok {topk} is not twice topk_group {chosen}: megatron would score its groups otherwise"


class Glm4Moe(SigmoidRouted):
    """GLM-4.5 to 4.7; queries and keys are normalised where the config says so."""

    name, may_have_bias, may_rotate_part = "glm4_moe", True, True

    def fields(self, config: Any) -> dict[str, Any]:
        return {"qk_layernorm": config.use_qk_norm, **super().fields(config)}


class DeepseekV3(SigmoidRouted):
    """Latent attention (arXiv:2412.19437, section 2.1.1); YaRN where rope_parameters say so. Kimi K2 and Moonlight too."""

    name, rope_types = "deepseek_v3", ("default", "yarn")

    def fields(self, config: Any) -> dict[str, Any]:
        rope = config.rope_parameters
        scaling: dict[str, Any] = {"rope_type": "rope", "rotary_scaling_factor": 1.0}
        if rope["rope_type"] == "yarn":
            same = ("original_max_position_embeddings", "mscale", "mscale_all_dim")
            scaling = {"rope_type": "yarn", "rotary_scaling_factor": rope["factor"], **{name: rope[name] for name in same}}
            scaling |= {"beta_fast": rope.get("beta_fast") or 32, "beta_slow": rope.get("beta_slow") or 1}
        return {
            "multi_latent_attention": True,
            "qk_layernorm": True,
            "q_lora_rank": config.q_lora_rank,  # none: megatron's default is another
            "rotary_base": rope["rope_theta"],
            "apply_rope_fusion": False,  # its kernel is for yarn alone
            **scaling,
            **super().fields(config),
        }


VERIFIED: dict[str, Family] = {
    **{family.name: family for family in (Qwen2(), Qwen3(), Qwen3Moe(), Llama(), Glm4(), Glm4Moe(), DeepseekV3())},
    "kimi_k2": DeepseekV3(),
}
"""model_type of config.json to its family."""
WRONG = {
    "mixtral": "its router was measured to give other logits (off by 1.3)",
    "qwen2_moe": "the gate of its shared expert has no map (logits off by 1.6)",
}
"""Types that look like a verified family and were measured wrong."""


def family_of(model_type: str, treat_as: str = "") -> Family:
    """The family of a model of this type; treat_as: `model.family`, which chooses it for a type that is not verified.

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

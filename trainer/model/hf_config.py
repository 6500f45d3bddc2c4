"""Megatron's settings for the model that a config.json describes."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from transformers import AutoConfig

from slimebus.config.model_folder import read_config
from trainer.arguments.option_table import megatron_values_from_hf
from trainer.hf.families import ALWAYS, VERIFIED, check_features, family_of
from trainer.hf.hf_map import HfMap

log = logging.getLogger("trainer")


def read_hf_config(folder: str, treat_as: str = "") -> tuple[str, Any]:
    """The family, and its config as transformers reads it. Raises ConfigError for what cannot be trained (see families)."""
    raw = read_config(Path(folder))
    model_type = str(raw.get("model_type"))
    family = family_of(model_type, treat_as)
    if model_type not in VERIFIED:
        log.warning("%s: model_type %s is trained as %s, as model.family says; that is not verified", folder, model_type, family)
    if model_type == family:
        config = AutoConfig.from_pretrained(folder)
    else:  # of another name, perhaps with code of its own: DeepSeek-V3's config has what Kimi K2's needs
        config = AutoConfig.for_model(family, **{key: value for key, value in raw.items() if key not in ("model_type", "auto_map")})
    check_features(family, {**raw, **config.to_dict()})
    if getattr(config, "attention_dropout", 0):
        text = "it is trained without dropout, unless megatron.attention_dropout says otherwise (sft alone)"
        log.info("%s: config.json has attention_dropout %s: %s", folder, config.attention_dropout, text)
    return family, config


def head_dim(config: Any) -> int:
    """Size of a query's head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_percent(config: Any) -> float:
    """The share of a head that the rotary embedding turns."""
    return float(config.rope_parameters.get("partial_rotary_factor", 1.0))


def hf_map(family: str, config: Any) -> HfMap:
    """The names and forms of its weights."""
    size = head_dim(config)
    return HfMap(
        vocab_size=config.vocab_size,
        head_dim=size,
        query_heads=config.num_attention_heads // config.num_key_value_heads,
        is_tied=bool(config.tie_word_embeddings),
        is_fused=family == "glm4",
        interleaved=int(size * rotary_percent(config)) if family == "glm4" else 0,
    )


def transformer_fields(family: str, config: Any) -> dict[str, Any]:
    """TransformerConfig's fields that follow from the model."""
    given = megatron_values_from_hf(config.to_dict())
    return {
        **{name: value for name, value in given.items() if name not in NOT_OF_LAYERS},
        "kv_channels": head_dim(config),
        "attention_dropout": 0.0,  # see read_hf_config
        "hidden_dropout": 0.0,
        "activation_func": F.silu,
        **ALWAYS,
        "add_qkv_bias": bool(getattr(config, "attention_bias", False)),
        **(EXPERTS if "num_moe_experts" in given else {}),
        **FAMILIES[family](config),
    }


def qwen3_moe_fields(config: Any) -> dict[str, Any]:
    """Softmax over the chosen experts, or over all of them before they are chosen, which does not normalise."""
    return {"qk_layernorm": True, "moe_router_score_function": "softmax", "moe_router_pre_softmax": not config.norm_topk_prob}


def glm4_moe_fields(config: Any) -> dict[str, Any]:
    """GLM-4.5: experts routed by sigmoid, and normalised queries and keys where the config says so."""
    return {"qk_layernorm": config.use_qk_norm, **sigmoid_routed_fields(config)}


def deepseek_v3_fields(config: Any) -> dict[str, Any]:
    """Latent attention (arXiv:2412.19437, section 2.1.1); YaRN where rope_parameters say so."""
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
        **sigmoid_routed_fields(config),
    }


def sigmoid_routed_fields(config: Any) -> dict[str, Any]:
    """Routing without a loss (arXiv:2408.15664): a bias decides the choice alone. It is not moved by training unless
    moe_router_bias_update_rate says so.
    """
    dense = min(config.first_k_dense_replace, config.num_hidden_layers)
    ungrouped = {} if (config.n_group or 1) > 1 else {"moe_router_num_groups": None, "moe_router_group_topk": None}
    return {
        "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts or None,
        **ungrouped,
    }


NOT_OF_LAYERS = ("vocab_size", "max_position_embeddings", "rotary_base", "rotary_percent")
"""What a config says that make_gpt takes beside TransformerConfig."""
EXPERTS = {"moe_router_load_balancing_type": "none", "moe_grouped_gemm": True}
"""Of every mixture of experts. Reinforcement learning keeps the routing: no balancing loss."""
FAMILIES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "qwen2": lambda config: {"add_qkv_bias": True},
    "qwen3": lambda config: {"qk_layernorm": True},
    "qwen3_moe": qwen3_moe_fields,
    "llama": lambda config: {},
    "glm4": lambda config: {},
    "glm4_moe": glm4_moe_fields,
    "deepseek_v3": deepseek_v3_fields,
}
"""What each adds to the fields that all have."""

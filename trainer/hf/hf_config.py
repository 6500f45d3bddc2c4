"""A config.json as the trainer reads it: its family, Megatron's settings for it, and the map of its weights."""

import logging
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from transformers import AutoConfig

from slimebus.config.model_folder import read_config
from trainer.hf.families import ALWAYS, VERIFIED, Family, family_of, megatron_values
from trainer.hf.hf_map import HfMap

log = logging.getLogger("trainer")

NOT_OF_LAYERS = ("vocab_size", "max_position_embeddings", "rotary_base", "rotary_percent")
"""What a config says that make_gpt takes beside TransformerConfig."""


def read_hf_config(folder: str, treat_as: str = "") -> tuple[Family, Any]:
    """The family, and its config as transformers reads it. Raises ConfigError for what cannot be trained (see families)."""
    raw = read_config(Path(folder))
    model_type = str(raw.get("model_type"))
    family = family_of(model_type, treat_as)
    if model_type not in VERIFIED:
        log.warning("%s: model_type %s is trained as %s, as model.family says; that is not verified", folder, model_type, family.name)
    if model_type == family.name:
        config = AutoConfig.from_pretrained(folder)
    else:  # of another name, perhaps with code of its own: DeepSeek-V3's config has what Kimi K2's needs
        values = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
        config = AutoConfig.for_model(family.name, **values)
    family.check({**raw, **config.to_dict()})
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


def hf_map(family: Family, config: Any) -> HfMap:
    """The names and forms of its weights."""
    size = head_dim(config)
    return HfMap(
        vocab_size=config.vocab_size,
        head_dim=size,
        query_heads=config.num_attention_heads // config.num_key_value_heads,
        is_tied=bool(config.tie_word_embeddings),
        is_fused=family.is_glm4,
        interleaved=int(size * rotary_percent(config)) if family.is_glm4 else 0,
    )


def transformer_fields(family: Family, config: Any) -> dict[str, Any]:
    """TransformerConfig's fields that follow from the model."""
    return {
        **{name: value for name, value in megatron_values(config.to_dict()).items() if name not in NOT_OF_LAYERS},
        "kv_channels": head_dim(config),
        "attention_dropout": 0.0,  # see read_hf_config
        "hidden_dropout": 0.0,
        "activation_func": F.silu,
        **ALWAYS,
        "add_qkv_bias": bool(getattr(config, "attention_bias", False)),
        **family.fields(config),
    }

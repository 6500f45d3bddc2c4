"""Names and forms of weights: one megatron parameter is one or several Hugging Face tensors.

    linear_qkv    of each key/value head: its query heads, its key head, its value head   <->   q_proj, k_proj, v_proj
    linear_fc1    gate, then up                                                           <->   gate_proj, up_proj
    others        as they are

A tensor-parallel rank's part of a parameter is made of the same part of each tensor, so joining and splitting need no other rank.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoConfig

from slimebus.bus.errors import ConfigError
from slimebus.config.model_folder import read_config
from trainer.hf.families import ALWAYS, VERIFIED, Family, family_of, megatron_values


class Rule(NamedTuple):
    """The tensors of one parameter, and the dimension that tensor-parallel ranks share (None: each has all of it)."""

    dim: int | None
    names: tuple[str, ...]


def _projections(*names: str, of: str, form: str = "weight") -> tuple[str, ...]:
    return tuple(f"{of}.{name}_proj.{form}" for name in names)


EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
TOP = {
    EMBEDDING: Rule(0, ("model.embed_tokens.weight",)),
    OUTPUT: Rule(0, ("lm_head.weight",)),
    "decoder.final_layernorm.weight": Rule(None, ("model.norm.weight",)),
}
LAYER = {
    "input_layernorm.weight": Rule(None, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Rule(None, ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(0, _projections("q", "k", "v", of="self_attn")),
    "self_attention.linear_qkv.bias": Rule(0, _projections("q", "k", "v", of="self_attn", form="bias")),
    "self_attention.q_layernorm.weight": Rule(None, ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(None, ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": Rule(1, ("self_attn.o_proj.weight",)),
    "self_attention.linear_proj.post_norm.weight": Rule(None, ("post_self_attn_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(None, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule(None, ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(0, _projections("gate", "up", of="mlp")),
    "mlp.linear_fc2.weight": Rule(1, _projections("down", of="mlp")),
    "mlp.linear_fc2.post_norm.weight": Rule(None, ("post_mlp_layernorm.weight",)),
    "mlp.router.weight": Rule(None, ("mlp.gate.weight",)),
    "mlp.router.expert_bias": Rule(None, ("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": Rule(0, _projections("gate", "up", of="mlp.shared_experts")),
    "mlp.shared_experts.linear_fc2.weight": Rule(1, _projections("down", of="mlp.shared_experts")),
    "mlp.experts.linear_fc1.weight": Rule(0, _projections("gate", "up", of="mlp.experts.{expert}")),
    "mlp.experts.linear_fc2.weight": Rule(1, _projections("down", of="mlp.experts.{expert}")),
    # latent attention
    "self_attention.linear_q_proj.weight": Rule(0, _projections("q", of="self_attn")),
    "self_attention.linear_q_down_proj.weight": Rule(None, ("self_attn.q_a_proj.weight",)),
    "self_attention.linear_q_up_proj.layer_norm_weight": Rule(None, ("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": Rule(0, ("self_attn.q_b_proj.weight",)),
    "self_attention.linear_kv_down_proj.weight": Rule(None, ("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.linear_kv_up_proj.layer_norm_weight": Rule(None, ("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": Rule(0, ("self_attn.kv_b_proj.weight",)),
}
IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
OF_EXPERT = re.compile(r"(mlp\.experts\.linear_fc[12]\.weight)(\d+)")
FUSED = {"mlp.linear_fc1.weight": Rule(0, ("mlp.gate_up_proj.weight",))}


@dataclass(frozen=True)
class HfMap:
    """The map of one model."""

    vocab_size: int
    """Rows of the embedding; megatron's may have more."""
    head_dim: int
    query_heads: int
    """Query heads that share a key/value head."""
    is_tied: bool = False
    """Whether the output layer is the embedding."""
    is_fused: bool = False
    """Whether the gate and up projections of a dense layer are one tensor (GLM-4)."""
    interleaved: int = 0
    """The first dimensions of a head, if the rotary embedding turns neighbours in them and not halves (GLM-4): query and key rows are
    reordered, so that megatron's rotation of halves, the one with fast kernels, gives the same scores."""

    def rule(self, name: str) -> Rule:
        """The tensors of a parameter, by its name in the whole model. Raises ConfigError for one that has none."""
        if name == OUTPUT and self.is_tied:
            return TOP[EMBEDDING]
        if name in TOP:
            return TOP[name]
        layer, local = _matched(IN_LAYER, name)
        key, expert = _matched(OF_EXPERT, local)
        found = (FUSED if self.is_fused else {}).get(key or local) or LAYER.get(key or local)
        if found is None:
            raise ConfigError(f"megatron's parameter {name} has no Hugging Face name; is there an option under `megatron:` that adds it?")
        return Rule(found.dim, tuple(f"model.layers.{layer}.{tensor.format(expert=expert)}" for tensor in found.names))

    def split(self, name: str, part: torch.Tensor) -> list[torch.Tensor]:
        """A rank's part of a parameter, as parts of its tensors; views where it can be."""
        if not is_qkv(name):
            return list(part.chunk(len(self.rule(name).names)))
        rest = part.shape[1:]
        heads = part.reshape(-1, self.query_heads + 2, self.head_dim, *rest).split([self.query_heads, 1, 1], 1)
        query, key, value = (rows.reshape(-1, *rest) for rows in heads)
        return [self._ordered(query, is_back=True), self._ordered(key, is_back=True), value]

    def join(self, name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of split."""
        if not is_qkv(name):
            return torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        query, key, value = self._ordered(parts[0]), self._ordered(parts[1]), parts[2]
        rest, size = query.shape[1:], self.head_dim
        by_head = [query.view(-1, self.query_heads, size, *rest), key.view(-1, 1, size, *rest), value.view(-1, 1, size, *rest)]
        return torch.cat(by_head, 1).reshape(-1, *rest)

    def merge(self, name: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The whole tensors of a parameter from every rank's part of it."""
        rule = self.rule(name)
        pieces = zip(*(self.split(name, part) for part in parts), strict=True)
        return [self._unpadded(name, self._whole(name, rule.dim or 0, list(of_ranks))) for of_ranks in pieces]

    def blocks(self, name: str) -> int:
        """Into how many equal blocks the first dimension of a tensor is cut before ranks share each of them."""
        return 2 if self.is_fused and name.endswith("mlp.linear_fc1.weight") else 1

    def _whole(self, name: str, dim: int, parts: list[torch.Tensor]) -> torch.Tensor:
        if len(parts) == 1:
            return parts[0]
        blocks = zip(*(part.chunk(self.blocks(name)) for part in parts), strict=True)
        return torch.cat([block for of_ranks in blocks for block in of_ranks]) if dim == 0 else torch.cat(parts, dim)

    def _unpadded(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: self.vocab_size] if name in (EMBEDDING, OUTPUT) else tensor

    def _ordered(self, rows: torch.Tensor, *, is_back: bool = False) -> torch.Tensor:
        """Rows of heads from neighbours (0 1 2 3) to halves (0 2 1 3), or back."""
        if not self.interleaved:
            return rows
        order = torch.arange(self.head_dim)
        order[: self.interleaved] = torch.arange(self.interleaved).view(-1, 2).T.reshape(-1)
        heads = rows.reshape(-1, self.head_dim, *rows.shape[1:])
        return heads[:, (order.argsort() if is_back else order).to(rows.device)].reshape(rows.shape)


def is_qkv(name: str) -> bool:
    """Whether a parameter holds queries, keys and values."""
    return name.endswith((".linear_qkv.weight", ".linear_qkv.bias"))


def _matched(pattern: re.Pattern[str], name: str) -> tuple[str, str]:
    """Its two groups; two empty strings where it does not match."""
    found = pattern.fullmatch(name)
    return (found[1], found[2]) if found else ("", "")


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

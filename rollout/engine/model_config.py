"""What the forward pass must know of a model, read from its `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimebus.errors import ConfigError

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a dense decoder; sizes count elements, `context_length` counts tokens."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    context_length: int
    rms_norm_eps: float
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    rope: dict[str, Any] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, model_path: Path) -> ModelConfig:
        """The config of the model in `model_path`; ConfigError names what is missing or not served."""
        raw = read_json(model_path / "config.json")
        architecture = (raw.get("architectures") or ["?"])[0]
        if architecture not in ARCHITECTURES:
            served = ", ".join(ARCHITECTURES)
            raise ConfigError(f"{model_path}/config.json: architecture {architecture}; this engine serves {served} (use SGLang for others)")
        _refuse_unserved(raw, model_path)
        return cls(architecture=architecture, eos_token_ids=_eos_token_ids(raw, model_path), rope=_rope(raw), **_shape(raw, architecture))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError names the file and what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; --model-path must name a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} could not be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _refuse_unserved(raw: dict[str, Any], model_path: Path) -> None:
    if raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or []):
        raise ConfigError(f"{model_path}/config.json: sliding-window attention is not served by this engine (use SGLang)")
    if raw.get("architectures") == ["MistralForCausalLM"] and raw.get("sliding_window"):
        raise ConfigError(f"{model_path}/config.json: sliding_window={raw['sliding_window']} is not served by this engine (use SGLang)")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{model_path}/config.json: hidden_act={raw['hidden_act']}; this engine serves silu")


def _shape(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    try:
        num_heads, hidden_size = int(raw["num_attention_heads"]), int(raw["hidden_size"])
        return {
            "vocab_size": int(raw["vocab_size"]),
            "hidden_size": hidden_size,
            "num_layers": int(raw["num_hidden_layers"]),
            "num_heads": num_heads,
            "num_kv_heads": int(raw.get("num_key_value_heads") or num_heads),
            "head_dim": int(raw.get("head_dim") or hidden_size // num_heads),
            "intermediate_size": int(raw["intermediate_size"]),
            "context_length": int(raw["max_position_embeddings"]),
            "rms_norm_eps": float(raw["rms_norm_eps"]),
            "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
            "qk_norm": architecture == "Qwen3ForCausalLM",
            "qkv_bias": architecture == "Qwen2ForCausalLM" or bool(raw.get("attention_bias", False)),
            "output_bias": architecture != "Qwen2ForCausalLM" and bool(raw.get("attention_bias", False)),
            "mlp_bias": bool(raw.get("mlp_bias", False)),
        }
    except KeyError as missing:
        raise ConfigError(f"config.json of a {architecture} has no {missing}") from None


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE constants from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in ("default", "linear", "llama3"):
        raise ConfigError(f"config.json: rope_type {rope['rope_type']!r}; this engine serves default, linear and llama3 (use SGLang)")
    return rope


def _eos_token_ids(raw: dict[str, Any], model_path: Path) -> frozenset[int]:
    """Every id that ends a sequence, from config.json and generation_config.json together, as SGLang takes them."""
    generation_path = model_path / "generation_config.json"
    sources = [raw, read_json(generation_path) if generation_path.exists() else {}]
    found: set[int] = set()
    for source in sources:
        eos = source.get("eos_token_id")
        found |= set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
    return frozenset(found)

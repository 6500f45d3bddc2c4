"""What the forward pass must know of a model, read from its `config.json`."""

from pathlib import Path
from typing import Any

import msgspec

from slimebus.bus.errors import ConfigError
from slimebus.config.model_folder import CONFIG, read_json

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
ROPE_TYPES = ("default", "linear", "llama3")


class EmbeddedModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and constants of a dense decoder, by their names in config.json. 0 stands for what others imply."""

    architectures: list[str]
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope: dict[str, Any]
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, model_path: Path) -> "EmbeddedModelConfig":
        """The config of the model in `model_path`; ConfigError names what is missing or not served."""
        path = model_path / CONFIG
        raw = {name: value for name, value in read_json(path).items() if value is not None}
        _refuse_unserved(raw, path)
        derived = {"rope": _rope(raw), "eos_token_ids": _eos_token_ids(raw, model_path)}
        try:
            config = msgspec.convert(raw | derived, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}") from None
        heads = config.num_attention_heads
        kv_heads, head_dim = config.num_key_value_heads or heads, config.head_dim or config.hidden_size // heads
        return msgspec.structs.replace(config, num_key_value_heads=kv_heads, head_dim=head_dim)

    @property
    def architecture(self) -> str:
        """One of ARCHITECTURES."""
        return self.architectures[0]

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normed."""
        return self.architecture == "Qwen3ForCausalLM"

    @property
    def qkv_bias(self) -> bool:
        """Whether the projections to queries, keys and values have a bias."""
        return self.attention_bias or self.architecture == "Qwen2ForCausalLM"

    @property
    def output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias and self.architecture != "Qwen2ForCausalLM"


def _refuse_unserved(raw: dict[str, Any], path: Path) -> None:
    architecture = (raw.get("architectures") or ["?"])[0]
    is_sliding = raw.get("use_sliding_window") or "sliding_attention" in raw.get("layer_types", [])
    refused = {
        f"architecture {architecture}; this engine serves {', '.join(ARCHITECTURES)}": architecture not in ARCHITECTURES,
        "sliding-window attention is not served by this engine": is_sliding or ("Mistral" in architecture and raw.get("sliding_window")),
        f"hidden_act={raw.get('hidden_act')}; this engine serves silu": raw.get("hidden_act", "silu") != "silu",
        f"rope_type {_rope(raw)['rope_type']!r}; this engine serves {', '.join(ROPE_TYPES)}": _rope(raw)["rope_type"] not in ROPE_TYPES,
    }
    for text, is_refused in refused.items():
        if is_refused:
            raise ConfigError(f"{path}: {text} (use SGLang)")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE constants from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    rope = {"rope_theta": raw.get("rope_theta", 10000.0)} | raw.get("rope_scaling", {}) | raw.get("rope_parameters", {})
    return rope | {"rope_type": rope.get("rope_type") or rope.get("type") or "default"}


def _eos_token_ids(raw: dict[str, Any], model_path: Path) -> list[int]:
    """Every id that ends a sequence, from config.json and generation_config.json together, as SGLang takes them."""
    generation = model_path / "generation_config.json"
    found: list[int] = []
    for source in (raw, read_json(generation) if generation.exists() else {}):
        eos = source.get("eos_token_id")
        found += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return found

"""Safetensors of a model directory, checked whole before anything of them is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from slimebus.errors import WeightsError

if TYPE_CHECKING:
    import torch

    from rollout.engine.model_config import ModelConfig

Parameters = dict[str, "torch.Tensor"]


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has, by Hugging Face name."""
    hidden, vocab, mlp = config.hidden_size, config.vocab_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer_shapes(config, hidden, mlp).items()}
    return shapes


def _layer_shapes(config: ModelConfig, hidden: int, mlp: int) -> dict[str, tuple[int, ...]]:
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (mlp, hidden),
        "mlp.up_proj.weight": (mlp, hidden),
        "mlp.down_proj.weight": (hidden, mlp),
    }
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (config.head_dim,), "self_attn.k_norm.weight": (config.head_dim,)}
    if config.qkv_bias:
        shapes |= {"self_attn.q_proj.bias": (query,), "self_attn.k_proj.bias": (key,), "self_attn.v_proj.bias": (key,)}
    if config.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.mlp_bias:
        shapes |= {"mlp.gate_proj.bias": (mlp,), "mlp.up_proj.bias": (mlp,), "mlp.down_proj.bias": (hidden,)}
    return shapes


def read_parameters(model_path: Path, config: ModelConfig, dtype: torch.dtype) -> Parameters:
    """All parameters of the model in `model_path`, copied out of the files as `dtype` (bf16 to fp32 is exact).

    WeightsError, naming the tensor or file, when one is missing, unknown, misshapen, not finite-typed or unreadable.
    """
    expected = expected_shapes(config)
    found: Parameters = {}
    for file in _safetensors_files(model_path):
        for name, tensor in sorted(_read_file(file).items()):  # the library gives them in no order; errors name the same tensor each time
            if _is_redundant(name, config):
                continue
            if name not in expected:
                raise WeightsError(f"{file}: tensor {name} is not part of a {config.architecture} of this config")
            if tuple(tensor.shape) != expected[name]:
                raise WeightsError(f"{file}: tensor {name} has shape {list(tensor.shape)}, expected {list(expected[name])}")
            if not tensor.is_floating_point():
                raise WeightsError(f"{file}: tensor {name} is {tensor.dtype}; quantised weights are not served by this engine")
            found[name] = tensor.to(dtype)
    missing = sorted(expected.keys() - found.keys())
    if missing:
        raise WeightsError(f"{model_path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    return found


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Written by some exporters although the config implies them."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def _safetensors_files(model_path: Path) -> list[Path]:
    index = model_path / "model.safetensors.index.json"
    single = model_path / "model.safetensors"
    if single.exists() and not index.exists():
        return [single]
    if not index.exists():
        raise WeightsError(f"{model_path} has neither model.safetensors nor model.safetensors.index.json")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is not an index of safetensors: {error!r}") from None
    escaping = [name for name in names if Path(name).name != name]
    if escaping:
        raise WeightsError(f"{index} names {escaping[0]}, which is not a file of the same directory")
    return sorted(model_path / name for name in names)


def _read_file(file: Path) -> Parameters:
    """Tensors of one file. Read, not mapped: a writer that replaces the file later cannot change what is served."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(file.read_bytes())
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise WeightsError(f"{file} could not be read as safetensors: {error}") from None

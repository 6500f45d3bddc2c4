"""The parameters of one version, laid out for the forward pass; what did not change since the version before is the same memory.

A unit is one matrix of the forward pass: a tensor of the model, or several that read the same input, fused. A unit none of whose
tensors changed is taken over from the version before as it is, unread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from rollout.engine.model_config import ModelConfig
from rollout.engine.weights import ModelFiles, Part
from slimebus.weights.tensor_file import TensorForm
from slimebus.weights.tensors import hash_bytes


class Unit(NamedTuple):
    """A matrix and the tensors it was made of; rows: how many of its rows are each one's."""

    forms: tuple[TensorForm, ...]
    rows: tuple[int, ...]
    matrix: torch.Tensor

    def parts(self) -> Iterator[tuple[TensorForm, torch.Tensor]]:
        """Each tensor as it is served."""
        for form, rows in zip(self.forms, self.matrix.split(list(self.rows)), strict=True):
            is_repeated = rows.shape != form.shape and bool((rows == rows[:1]).all())
            yield form, rows[0] if is_repeated else rows


Units = dict[tuple[str, ...], Unit]


class _Assembly:
    """Makes units out of files, or takes them over."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, old: Units) -> None:
        self._files, self._dtype, self._old = files, dtype, old
        self.units: Units = {}

    def one(self, name: str) -> torch.Tensor:
        def make(parts: list[Part]) -> tuple[torch.Tensor, tuple[int, ...]]:
            values = parts[0].values
            is_ours = values.dtype != self._dtype or self._files.is_immutable  # converted is copied; a file that may change must be
            return values.to(self._dtype, copy=not is_ours), (len(values),)

        return self._unit((name,), make)

    def fused(self, *names: str) -> torch.Tensor:
        def make(parts: list[Part]) -> tuple[torch.Tensor, tuple[int, ...]]:
            rows = tuple(len(part.values) for part in parts)
            matrix = torch.empty((sum(rows), *parts[0].values.shape[1:]), dtype=self._dtype)
            for target, part in zip(matrix.split(list(rows)), parts, strict=True):
                target.copy_(part.values)
            return matrix, rows

        return self._unit(names, make)

    def repeated(self, counts: dict[str, int]) -> torch.Tensor:
        """One row for each head."""

        def make(parts: list[Part]) -> tuple[torch.Tensor, tuple[int, ...]]:
            rows = tuple(counts.values())
            return torch.cat([part.values.to(self._dtype).expand(n, -1) for part, n in zip(parts, rows, strict=True)]), rows

        return self._unit(tuple(counts), make)

    def _unit(self, names: tuple[str, ...], make: Callable[[list[Part]], tuple[torch.Tensor, tuple[int, ...]]]) -> torch.Tensor:
        unit = self._old.get(names)
        if unit is None or not all(self._files.has(form) for form in unit.forms):
            parts = [self._files.read(name) for name in names]
            matrix, rows = make(parts)
            unit = Unit(tuple(part.form for part in parts), rows, matrix)
        self.units[names] = unit
        return unit.matrix


class LayerWeights:
    """One layer's parameters, projections that read the same input fused into one matrix."""

    def __init__(self, assembly: _Assembly, prefix: str, config: ModelConfig) -> None:
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        output, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"

        def weight(*names: str) -> torch.Tensor:
            return assembly.fused(*(f"{name}.weight" for name in names)) if len(names) > 1 else assembly.one(f"{names[0]}.weight")

        def bias(has_one: bool, *names: str) -> torch.Tensor | None:
            return assembly.fused(*(f"{name}.bias" for name in names)) if has_one else None

        self.attention_norm, self.mlp_norm = weight(f"{prefix}input_layernorm"), weight(f"{prefix}post_attention_layernorm")
        self.qkv, self.gate_up, self.output, self.down = weight(*qkv), weight(*gate_up), weight(output), weight(down)
        self.qkv_bias, self.gate_up_bias = bias(config.qkv_bias, *qkv), bias(config.mlp_bias, *gate_up)
        self.output_bias, self.down_bias = bias(config.output_bias, output), bias(config.mlp_bias, down)
        self.qk_norm: torch.Tensor | None = None
        if config.qk_norm:
            heads = {"q": config.num_heads, "k": config.num_kv_heads}
            self.qk_norm = assembly.repeated({f"{prefix}self_attn.{name}_norm.weight": count for name, count in heads.items()})


class ModelWeights:
    """All parameters of one version, ready for the forward pass; never changed after it is made."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, *, old: ModelWeights | None = None) -> None:
        """Read a model directory whole, as `dtype` (bf16 to fp32 is exact). old: the version before, of the same dtype.

        Raises WeightsError as ModelFiles does; nothing of it can be seen then.
        """
        assembly = _Assembly(ModelFiles(path, config), dtype, old.units if old else {})
        self.embedding = assembly.one("model.embed_tokens.weight")
        self.head = self.embedding if config.tied_embeddings else assembly.one("lm_head.weight")
        self.norm = assembly.one("model.norm.weight")
        self.layers = [LayerWeights(assembly, f"model.layers.{layer}.", config) for layer in range(config.num_layers)]
        self.units: Units = assembly.units

    def served_forms(self) -> list[TensorForm]:
        """Every tensor with the hash of what is in memory now, in the dtype that it was read as."""
        found = []
        for unit in self.units.values():
            for form, served in unit.parts():
                content = served.to(getattr(torch, form.dtype)).contiguous().view(torch.uint8).numpy()
                found.append(form._replace(hash=hash_bytes(content)))
        return found

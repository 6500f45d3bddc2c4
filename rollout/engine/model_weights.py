"""The parameters of one version, laid out for the forward pass; what did not change since the version before is the same memory.

A unit is one matrix of the forward pass: a tensor of the model, or several that read the same input, fused. A unit none of whose
tensors changed is taken over from the version before as it is, unread. What changed is read and checked whole beside generation,
then written over what it replaces between two steps: no second copy of the model, and no new pages, which cost more than the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from rollout.engine.model_config import ModelConfig
from rollout.engine.weights import ModelFiles
from slimebus.weights.tensor_file import TensorForm
from slimebus.weights.tensors import hash_bytes


class Unit(NamedTuple):
    """A matrix and the tensors it was made of; rows: how many of its rows are each one's. is_file: it is the file's own memory."""

    forms: tuple[TensorForm, ...]
    rows: tuple[int, ...]
    matrix: torch.Tensor
    is_file: bool = False

    def parts(self) -> Iterator[tuple[TensorForm, torch.Tensor]]:
        """Each tensor as it is served."""
        for form, rows in zip(self.forms, self.matrix.split(list(self.rows)), strict=True):
            is_repeated = rows.shape != form.shape and bool((rows == rows[:1]).all())
            yield form, rows[0] if is_repeated else rows


Units = dict[tuple[str, ...], Unit]


class _Assembly:
    """Makes units out of files, or takes them over. copies: what is still to be written into memory of the version before."""

    def __init__(self, files: ModelFiles, dtype: torch.dtype, old: Units) -> None:
        self._files, self._dtype, self._old = files, dtype, old
        self.units: Units = {}
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def unit(self, *names: str, repeats: tuple[int, ...] = ()) -> torch.Tensor:
        """The tensors below each other; with repeats each is one row, so many times."""
        unit = self._old.get(names)
        if unit is None or not all(self._files.has(form) for form in unit.forms):
            unit = self._read(names, repeats, unit)
        self.units[names] = unit
        return unit.matrix

    def _read(self, names: tuple[str, ...], repeats: tuple[int, ...], old: Unit | None) -> Unit:
        parts = [self._files.read(name) for name in names]
        forms, values = tuple(part.form for part in parts), [part.values for part in parts]
        rows = repeats or tuple(map(len, values))
        if len(parts) == 1 and not repeats and self._files.is_immutable and values[0].dtype == self._dtype:
            return Unit(forms, rows, values[0], is_file=True)
        if old is not None and not old.is_file:
            self.copies += zip(old.matrix.split(list(rows)), values, strict=True)
            return Unit(forms, rows, old.matrix)
        matrix = torch.empty((sum(rows), *(values[0].shape if repeats else values[0].shape[1:])), dtype=self._dtype)
        _copy(zip(matrix.split(list(rows)), values, strict=True))
        return Unit(forms, rows, matrix)


def _copy(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, values in copies:
        target.copy_(values)


class LayerWeights:
    """One layer's parameters, projections that read the same input fused into one matrix."""

    def __init__(self, assembly: _Assembly, prefix: str, config: ModelConfig) -> None:
        qkv = [f"{prefix}self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{prefix}mlp.{name}_proj" for name in ("gate", "up")]
        output, down = f"{prefix}self_attn.o_proj", f"{prefix}mlp.down_proj"

        def weight(*names: str) -> torch.Tensor:
            return assembly.unit(*(f"{name}.weight" for name in names))

        def bias(has_one: bool, *names: str) -> torch.Tensor | None:
            return assembly.unit(*(f"{name}.bias" for name in names)) if has_one else None

        self.attention_norm, self.mlp_norm = weight(f"{prefix}input_layernorm"), weight(f"{prefix}post_attention_layernorm")
        self.qkv, self.gate_up, self.output, self.down = weight(*qkv), weight(*gate_up), weight(output), weight(down)
        self.qkv_bias, self.gate_up_bias = bias(config.qkv_bias, *qkv), bias(config.mlp_bias, *gate_up)
        self.output_bias, self.down_bias = bias(config.output_bias, output), bias(config.mlp_bias, down)
        self.qk_norm: torch.Tensor | None = None
        if config.qk_norm:
            norms = [f"{prefix}self_attn.{name}_norm.weight" for name in "qk"]
            self.qk_norm = assembly.unit(*norms, repeats=(config.num_heads, config.num_kv_heads))


class ModelWeights:
    """All parameters of one version, ready for the forward pass."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, *, old: ModelWeights | None = None) -> None:
        """Read a model directory whole, as `dtype` (bf16 to fp32 is exact). old: the version before, of the same dtype.

        With old, which may be in use meanwhile, these are complete only after `take_over`. Raises WeightsError as ModelFiles does;
        nothing of it can be seen then.
        """
        self._old_units = old.units if old else {}
        assembly = _Assembly(ModelFiles(path, config), dtype, self._old_units)
        self.embedding = assembly.unit("model.embed_tokens.weight")
        self.head = self.embedding if config.tied_embeddings else assembly.unit("lm_head.weight")
        self.norm = assembly.unit("model.norm.weight")
        self.layers = [LayerWeights(assembly, f"model.layers.{layer}.", config) for layer in range(config.num_layers)]
        self.units: Units = assembly.units
        self._copies = assembly.copies

    def take_over(self) -> None:
        """Put what changed into the memory of the version before, which nobody may be using and which is gone then."""
        self._old_units.clear()  # first: should this fail, nothing of the old version passes for unchanged
        copies, self._copies = self._copies, []
        _copy(copies)

    def served_forms(self) -> list[TensorForm]:
        """Every tensor with the hash of what is in memory now, in the dtype that it was read as."""
        found = []
        for unit in self.units.values():
            for form, served in unit.parts():
                content = served.to(getattr(torch, form.dtype)).contiguous().view(torch.uint8).numpy()
                found.append(form._replace(hash=hash_bytes(content)))
        return found

"""The parameters of one version, laid out for the forward pass; what did not change since the version before is the same memory.

A unit is one matrix of the forward pass: a tensor of the model, or several that read the same input, fused. A unit none of whose
tensors changed is taken over from the version before as it is, unread. What changed is read and checked whole beside generation,
then written over what it replaces between two steps: no second copy of the model, and no new pages, which cost more than the copy.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from rollout.embedded.model_config import ModelConfig
from rollout.embedded.model_files import ModelFiles, layer_matrices
from slimebus.weights.tensors import TensorForm


class Unit(NamedTuple):
    """A matrix and the tensors it was made of. is_file: it is the file's own memory."""

    forms: tuple[TensorForm, ...]
    matrix: torch.Tensor
    is_file: bool = False


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

    def layer(self, prefix: str, config: ModelConfig) -> "LayerWeights":
        """The matrices of the layer whose tensors have this prefix."""
        repeats, made = {"qk_norm": (config.num_attention_heads, config.num_key_value_heads)}, dict[str, torch.Tensor]()
        for matrix, tensors in layer_matrices(config).items():
            made[matrix] = self.unit(*(f"{prefix}.{name}" for name in tensors), repeats=repeats.get(matrix, ()))
        return LayerWeights(**made)

    def _read(self, names: tuple[str, ...], repeats: tuple[int, ...], old: Unit | None) -> Unit:
        forms, values = zip(*map(self._files.read, names), strict=True)
        rows = repeats or tuple(map(len, values))
        if len(names) == 1 and not repeats and self._files.is_immutable and values[0].dtype == self._dtype:
            return Unit(forms, values[0], is_file=True)
        if old is not None and not old.is_file:
            self.copies += zip(old.matrix.split(list(rows)), values, strict=True)
            return Unit(forms, old.matrix)
        matrix = torch.empty((sum(rows), *(values[0].shape if repeats else values[0].shape[1:])), dtype=self._dtype)
        _copy(zip(matrix.split(list(rows)), values, strict=True))
        return Unit(forms, matrix)


def _copy(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, values in copies:
        target.copy_(values)


class LayerWeights(NamedTuple):
    """One layer's matrices (layer_matrices)."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    qk_norm: torch.Tensor | None = None


class ModelWeights:
    """All parameters of one version, ready for the forward pass."""

    def __init__(self, path: Path, config: ModelConfig, dtype: torch.dtype, *, old: "ModelWeights | None" = None) -> None:
        """Read a model directory whole, as `dtype` (bf16 to fp32 is exact). old: the version before, of the same dtype.

        With old, which may be in use meanwhile, these are complete only after `take_over`. Raises WeightsError as ModelFiles does;
        nothing of it can be seen then.
        """
        self._old_units = old.units if old else {}
        assembly = _Assembly(ModelFiles(path, config), dtype, self._old_units)
        self.embedding = assembly.unit("model.embed_tokens.weight")
        self.head = self.embedding if config.tie_word_embeddings else assembly.unit("lm_head.weight")
        self.norm = assembly.unit("model.norm.weight")
        self.layers = [assembly.layer(f"model.layers.{number}", config) for number in range(config.num_hidden_layers)]
        self.units: Units = assembly.units
        self._copies = assembly.copies

    def take_over(self) -> None:
        """Put what changed into the memory of the version before, which nobody may be using and which is gone then."""
        self._old_units.clear()  # first: should this fail, nothing of the old version passes for unchanged
        copies, self._copies = self._copies, []
        _copy(copies)

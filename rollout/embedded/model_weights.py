"""The parameters of one version, laid out for the forward pass; what did not change since the version before is the same memory.

A unit is one matrix of the forward pass: a tensor of the model, or several that read the same input, fused. A unit with none of its
tensors changed is taken over from the version before as it is, unread. What changed is read and checked whole beside generation,
then written over what it replaces between two steps: no second copy of the model, and no new pages, which cost more than the copy.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollout.embedded.model_config import EmbeddedModelConfig
from slimebus.bus.errors import WeightsError
from slimebus.weights.host.safetensors_file import INDEX_FILE, read_file, read_model
from slimebus.weights.host.tensor_file import file_name
from slimebus.weights.tensors import Tensor, TensorForm, hash_bytes

Shape = tuple[int, ...]


def layer_matrices(config: EmbeddedModelConfig) -> dict[str, dict[str, Shape]]:
    """The matrices of a layer, and the tensors that each is made of, below each other; projections of the same input are fused."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    matrices: dict[str, dict[str, Shape]] = {
        "attention_norm": {"input_layernorm.weight": (hidden,)},
        "mlp_norm": {"post_attention_layernorm.weight": (hidden,)},
        "qkv": {f"self_attn.{name}_proj.weight": (rows, hidden) for name, rows in (("q", query), ("k", key), ("v", key))},
        "output": {"self_attn.o_proj.weight": (hidden, query)},
        "gate_up": {"mlp.gate_proj.weight": (mlp, hidden), "mlp.up_proj.weight": (mlp, hidden)},
        "down": {"mlp.down_proj.weight": (hidden, mlp)},
    }
    has_bias = {"qkv": config.qkv_bias, "output": config.output_bias, "gate_up": config.mlp_bias, "down": config.mlp_bias}
    for name in (name for name, has_one in has_bias.items() if has_one):
        matrices[f"{name}_bias"] = {tensor.replace("weight", "bias"): shape[:1] for tensor, shape in matrices[name].items()}
    if config.qk_norm:
        matrices["qk_norm"] = {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in "qk"}
    return matrices


def expected_shapes(config: EmbeddedModelConfig) -> dict[str, Shape]:
    """Every tensor that a model of this config has, by Hugging Face name."""
    embedding = (config.vocab_size, config.hidden_size)
    shapes = {"model.embed_tokens.weight": embedding, "model.norm.weight": (config.hidden_size,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = embedding
    layer_shapes = {name: shape for matrix in layer_matrices(config).values() for name, shape in matrix.items()}
    return shapes | {f"model.layers.{i}.{name}": shape for i in range(config.num_hidden_layers) for name, shape in layer_shapes.items()}


class ModelFiles:
    """The weights of a model directory, each tensor read and checked when it is asked for. All names are checked at once.

    A directory that says in its index what each tensor hashes to (a worker's, docs/decisions/weights-through-shared-memory.md) has
    files that never change. Of any other the hashes are computed.
    """

    def __init__(self, path: Path, config: EmbeddedModelConfig) -> None:
        """WeightsError, naming the tensor or file, when one is missing, unknown or unreadable."""
        self._path, self._shapes = path, expected_shapes(config)
        self._map, self._hashes = _shared_index(path)
        self.is_immutable = bool(self._hashes)
        # Who writes to the files of any other directory while they are loaded is answered for by nobody.
        self._plain = {} if self.is_immutable else _readable(lambda: read_model(path, "private"), path)
        names = {name for name in self._map or self._plain if not _is_redundant(name, config)}
        if unknown := sorted(names - self._shapes.keys()):
            raise WeightsError(f"{path}: tensor {unknown[0]} is not part of a {config.architecture} of this config")
        if missing := sorted(self._shapes.keys() - names):
            raise WeightsError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")

    def has(self, form: TensorForm) -> bool:
        """Whether this tensor is the same here: in name, dtype, shape and every byte."""
        if self.is_immutable:
            return self._map.get(form.name) == file_name(form)
        return self._form(form.name, self._plain[form.name]) == form

    def read(self, name: str) -> tuple[TensorForm, torch.Tensor]:
        """A tensor in the dtype of its file, over its memory: never to be written to.

        WeightsError when it is misshapen, quantised or has other bytes than the index says.
        """
        tensor = self._shared_tensor(name) if self.is_immutable else self._plain[name]
        if tensor.shape != self._shapes[name]:
            raise WeightsError(f"{self._path}: tensor {name} has shape {list(tensor.shape)}, expected {list(self._shapes[name])}")
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        if not dtype.is_floating_point:
            raise WeightsError(f"{self._path}: tensor {name} is {tensor.dtype}; quantised weights are not served by this engine")
        form = self._form(name, tensor)
        if self.is_immutable and form.hash != self._hashes[name]:
            raise WeightsError(f"{self._path / self._map[name]}: tensor {name} hashes to {form.hash}, the index says {self._hashes[name]}")
        return form, torch.frombuffer(tensor.buffer, dtype=dtype).view(tensor.shape)

    def _shared_tensor(self, name: str) -> Tensor:
        file = self._path / self._map[name]
        found = _readable(lambda: dict(read_file(file, "private")), file)
        if found.keys() != {name}:
            raise WeightsError(f"{file} has the tensors {sorted(found)}; the index says {name}")
        return found[name]

    def _form(self, name: str, tensor: Tensor) -> TensorForm:
        return TensorForm(name, tensor.dtype, tensor.shape, hash_bytes(tensor.buffer))


def _is_redundant(name: str, config: EmbeddedModelConfig) -> bool:
    """Written by some exporters although the config implies them."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _shared_index(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """File and hash of each tensor where an index says both, else nothing."""
    try:
        index: Any = json.loads((path / INDEX_FILE).read_text(encoding="utf-8"))
        weight_map, hashes = index["weight_map"], index["metadata"]["hashes"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, {}
    if not isinstance(weight_map, dict) or not isinstance(hashes, dict) or weight_map.keys() != hashes.keys():
        raise WeightsError(f"{path / INDEX_FILE}: weight_map and metadata.hashes must name the same tensors")
    if escaping := [file for file in weight_map.values() if Path(str(file)).name != file]:
        raise WeightsError(f"{path / INDEX_FILE} names {escaping[0]}, which is not a file of the same directory")
    return weight_map, hashes


def _readable(read: Callable[[], dict[str, Tensor]], path: Path) -> dict[str, Tensor]:
    try:
        return read()
    except OSError as error:
        raise WeightsError(f"{path} could not be read: {error.strerror}") from None


class WeightUnit(NamedTuple):
    """A matrix and the tensors it was made of. is_file: it is the file's own memory."""

    forms: tuple[TensorForm, ...]
    matrix: torch.Tensor
    is_file: bool = False


Units = dict[tuple[str, ...], WeightUnit]


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

    def layer(self, prefix: str, config: EmbeddedModelConfig) -> "LayerWeights":
        """The matrices of the layer with this prefix of its tensors."""
        repeats, made = {"qk_norm": (config.num_attention_heads, config.num_key_value_heads)}, dict[str, torch.Tensor]()
        for matrix, tensors in layer_matrices(config).items():
            made[matrix] = self.unit(*(f"{prefix}.{name}" for name in tensors), repeats=repeats.get(matrix, ()))
        return LayerWeights(**made)

    def _read(self, names: tuple[str, ...], repeats: tuple[int, ...], old: WeightUnit | None) -> WeightUnit:
        forms, values = zip(*map(self._files.read, names), strict=True)
        rows = repeats or tuple(map(len, values))
        if len(names) == 1 and not repeats and self._files.is_immutable and values[0].dtype == self._dtype:
            return WeightUnit(forms, values[0], is_file=True)
        if old is not None and not old.is_file:
            self.copies += zip(old.matrix.split(list(rows)), values, strict=True)
            return WeightUnit(forms, old.matrix)
        matrix = torch.empty((sum(rows), *(values[0].shape if repeats else values[0].shape[1:])), dtype=self._dtype)
        _copy(zip(matrix.split(list(rows)), values, strict=True))
        return WeightUnit(forms, matrix)


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

    def __init__(self, path: Path, config: EmbeddedModelConfig, dtype: torch.dtype, *, old: "ModelWeights | None" = None) -> None:
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

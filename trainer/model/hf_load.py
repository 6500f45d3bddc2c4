"""Loads a Hugging Face directory into a model, one tensor after the other: each rank reads its own part of each tensor, from mapped files.

Neither the checkpoint nor the model is ever in memory a second time; what a rank does not need is not read.
"""

import logging
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from slimebus.bus.errors import ConfigError, FatalWeightsError
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.tensors import Tensor
from trainer.hf.hf_map import EMBEDDING, IN_LAYER, OF_EXPERT, OUTPUT, HfMap
from trainer.model import parallel

log = logging.getLogger("trainer")

LOADED_DTYPES = ("bfloat16", "float16", "float32")
EXPERT_MARK = ".mlp.experts."
LAYER = re.compile(r"model\.layers\.(\d+)\.")


def load_weights(gpt: Any, hf: HfMap, folder: str | Path, num_layers: int) -> None:
    """Copy the checkpoint's tensors into this rank's parameters and saved buffers; every rank calls it.

    Raises ConfigError that names the file, tensor or shape when the checkpoint is not that of the model: a shard or a tensor that is
    missing, one of another shape, or one that has no place in the model. Layers after the last one (multi-token prediction) are left
    out, with a line in the log.
    """
    try:
        tensors = read_model(Path(folder))
    except FatalWeightsError as bad:
        raise ConfigError(f"model.hf_checkpoint: {bad.text}") from None
    live, used = gpt.state_dict(keep_vars=True), set[str]()
    for name, whole_name in expert_names(gpt).items():
        used.update(hf.rule(whole_name).names)
        load_parameter(live[name].data, hf, whole_name, tensors, str(folder))
    check_rest(tensors.keys() - set().union(*parallel.gather(used, set[str])), str(folder), num_layers)


def expert_names(gpt: Any) -> dict[str, str]:
    """This rank's parameters and saved buffers: name to the name with the layer's and expert's number in the whole model."""
    ranks = parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * ((gpt.config.num_moe_experts or 0) // ranks)
    names = {}
    for name in gpt.state_dict(keep_vars=True):
        if name.endswith("_extra_state"):  # Transformer Engine's
            continue
        names[name] = name
        if found := IN_LAYER.fullmatch(name):
            local = found[2]
            if expert := OF_EXPERT.fullmatch(local):
                local = f"{expert[1]}{int(expert[2]) + first_expert}"
            names[name] = f"decoder.layers.{gpt.decoder.layers[int(found[1])].layer_number - 1}.{local}"
    return names


def tensor_group(name: str) -> Any:
    """The tensor-parallel ranks that share a parameter."""
    if EXPERT_MARK in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


@torch.no_grad()
def load_parameter(mine: torch.Tensor, hf: HfMap, name: str, tensors: Mapping[str, Tensor], folder: str) -> None:
    """Fill this rank's part of one parameter."""
    rule, group = hf.rule(name), tensor_group(name)
    rank, ranks = (0, 1) if rule.dim is None else (group.rank(), group.size())
    wanted = hf.split(name, torch.empty(mine.shape, device="meta"))
    if name in (EMBEDDING, OUTPUT):  # rows beyond the vocabulary only fill it up to a multiple of the ranks
        first = rank * mine.shape[0]
        rows = slice(min(first, hf.vocab_size), min(first + mine.shape[0], hf.vocab_size))
        shape = (hf.vocab_size, *mine.shape[1:])
        mine[: rows.stop - rows.start] = as_torch(tensors, rule.names[0], shape, folder)[rows]
        mine[rows.stop - rows.start :] = 0
        return
    parts = []
    for tensor_name, part in zip(rule.names, wanted, strict=True):
        shape = tuple(size * ranks if dim == rule.dim else size for dim, size in enumerate(part.shape))
        blocks = as_torch(tensors, tensor_name, shape, folder).chunk(hf.blocks(name))
        own = [block.chunk(ranks, rule.dim or 0)[rank] for block in blocks]
        parts.append(torch.cat(own) if len(own) > 1 else own[0])
    mine.copy_(hf.join(name, parts))


def as_torch(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], folder: str) -> torch.Tensor:
    """A tensor of the checkpoint over its mapped file. Raises ConfigError when it is missing, of another shape, or not plain numbers."""
    found = tensors.get(name)
    if found is None:
        raise ConfigError(f"model.hf_checkpoint: {folder}: no tensor {name}, which the model of its config.json has")
    if found.shape != shape:
        raise ConfigError(f"model.hf_checkpoint: {folder}: {name} has shape {list(found.shape)}, its config.json says {list(shape)}")
    if found.dtype not in LOADED_DTYPES:
        remedy = "quantised weights are not loaded, convert them to bfloat16 first"
        raise ConfigError(f"model.hf_checkpoint: {folder}: {name} is {found.dtype}; {remedy}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # it is only read
        return torch.frombuffer(found.buffer, dtype=getattr(torch, found.dtype)).view(shape)


def check_rest(rest: Iterable[str], folder: str, num_layers: int) -> None:
    """Raise ConfigError for tensors that no rank has loaded: a feature of the model that its map has not. Log those left out."""
    beyond, unknown = list[str](), list[str]()
    for name in sorted(rest):
        layer = LAYER.match(name)
        if layer and int(layer[1]) >= num_layers:
            beyond.append(name)
        elif not name.endswith("rotary_emb.inv_freq") and name != "lm_head.weight":  # made anew; a copy of tied embeddings
            unknown.append(name)
    if unknown:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        raise ConfigError(f"model.hf_checkpoint: {folder}: {len(unknown)} tensors have no place in the model: {some}")
    if beyond and parallel.is_main_rank():
        what = f"{len(beyond)} tensors of layers from {num_layers} on (multi-token prediction)"
        log.warning("%s are not loaded, trained, published or exported", what)

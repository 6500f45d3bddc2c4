"""The weights as Hugging Face names them: each tensor whole on the one rank that owns it, or all of them gathered to rank 0.

    parameter of this rank --(merge over its tensor-parallel group)--> Hugging Face tensors --> owned, or sent to rank 0

An owner is the first tensor-parallel and data-parallel rank of a pipeline stage, and of each expert-parallel part for its experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer.model import parallel
from trainer.model.gpt import Model

EXPERT_MARK = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron parameter or buffer of this rank that it helps to export."""

    name: str
    """With the numbers that its layer and its expert have in the whole model."""
    live: torch.Tensor
    """This rank's part, with megatron's marks of how it is split."""
    group: Any
    """The ranks that hold the parts of one copy of it; the first of them gets the whole."""


class Held(msgspec.Struct, frozen=True):
    """A Hugging Face tensor and the global rank that holds it whole; dtype: torch's name."""

    name: str
    shape: list[int]
    dtype: str
    rank: int


class HfExport:
    """A plan made once and used at each export: which parameters, which names, who owns what. Every rank makes and runs it.

    owners: the global ranks that own tensors, rank 0 first. A name that several hold (tied embeddings) is owned by the first.
    """

    def __init__(self, model: Model) -> None:
        self.bridge = model.bridge
        names = self.bridge._weight_name_mapping_mcore_local_to_global(model.gpt)
        live = model.gpt.state_dict(keep_vars=True)  # with buffers that are saved: the router's correction bias
        self.parameters = [parameter for name in names if (parameter := exported(names[name], live[name]))]
        mine = [Held(name, list(whole.shape), str(whole.dtype)[len("torch.") :], dist.get_rank()) for name, whole in self.held_tensors()]
        self.owned: dict[str, Held] = {}
        for payload in parallel.gather_bytes(msgspec.msgpack.encode(mine)):
            for held in msgspec.msgpack.decode(payload, type=list[Held]):
                self.owned.setdefault(held.name, held)
        self.owners = sorted({0, *(held.rank for held in self.owned.values())})

    @torch.no_grad()
    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has whole after merging over tensor-parallel groups, by Hugging Face name."""
        seen = set()
        for parameter in self.parameters:
            whole = self.whole(parameter)
            for name, tensor in zip(*self.bridge._weight_to_hf_format(parameter.name, whole), strict=True):
                if name not in seen and parameter.group.rank() == 0:
                    seen.add(name)
                    yield name, tensor

    def whole(self, parameter: Parameter) -> torch.Tensor:
        """The parameter with the parts of its group."""
        mine, count = parameter.live.data, parameter.group.size()
        if not getattr(parameter.live, "tensor_model_parallel", False) or count == 1:
            return mine
        parts = [torch.empty_like(mine) for _ in range(count)]
        dist.all_gather(parts, mine.contiguous(), group=parameter.group)
        return self.bridge._weight_merge_across_tp(parameter.name, parts, parameter.live)

    def owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what this rank owns, nothing on most ranks; every rank must run it to its end.

        Tensors may be views of the live weights: use or copy them before the next step.
        """
        for name, tensor in self.held_tensors():
            if self.owned[name].rank == dist.get_rank():
                yield name, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the whole model on rank 0 and nothing elsewhere; every rank must run it to its end. As `owned_tensors`."""
        if not parallel.is_main_rank():
            for _, tensor in list(self.owned_tensors()):  # merged first: rank 0 may wait for this rank's part of what it merges itself
                dist.send(tensor.contiguous(), 0)
            return
        yield from self.owned_tensors()
        for held in self.owned.values():
            if held.rank != 0:
                tensor = torch.empty(held.shape, dtype=getattr(torch, held.dtype), device=parallel.device())
                dist.recv(tensor, held.rank)
                yield held.name, tensor


def exported(name: str, live: Any) -> Parameter | None:
    """How this rank takes part in exporting a parameter of it; None where another data-parallel rank does."""
    if EXPERT_MARK in name:
        replica, group = parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_tensor_parallel_group()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        group = parallel_state.get_tensor_model_parallel_group()
    return Parameter(name, live, group) if replica == 0 else None

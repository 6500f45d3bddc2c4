"""The weights as Hugging Face names them: each tensor whole on the one rank that owns it, or all of them gathered to rank 0.

    parameter of this rank --(merge over its tensor-parallel group)--> Hugging Face tensors --> owned, or sent to rank 0

An owner is the first tensor-parallel and data-parallel rank of a pipeline stage, and of each expert-parallel part for its experts.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer import parallel
from trainer.model import Model

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EXPERT_MARK = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron parameter of this rank that it helps to export."""

    name: str
    """With the numbers that its layer and its expert have in the whole model."""
    tensor: torch.Tensor
    """This rank's part, live."""
    group: Any
    """The ranks that hold the parts of one copy of it; the first of them gets the whole."""


@dataclass(frozen=True, slots=True)
class Held:
    """A Hugging Face tensor and the rank that owns it."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    owner: int
    """Its global rank."""


class HfExport:
    """A plan made once and used at each export: which parameters, which names, who owns what. Every rank makes and runs it.

    owners: the global ranks that own tensors, rank 0 first.
    """

    def __init__(self, model: Model) -> None:
        self.bridge = model.bridge
        gpt = model.gpt
        names = self.bridge._weight_name_mapping_mcore_local_to_global(gpt)
        self.parameters = [parameter for name, live in gpt.named_parameters() if (parameter := exported(names[name], live))]
        self.elsewhere: list[Held] = []
        self.skipped: set[str] = set()
        self.owners = [0]
        if dist.get_world_size() > 1:
            self.plan()

    def plan(self) -> None:
        """Tell every rank what the others hold; a name that several hold (tied embeddings) is owned by the first."""
        mine = [(name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in self.held_tensors()]
        owners: dict[str, int] = {}
        for rank, payload in enumerate(parallel.gather_bytes(json.dumps(mine).encode(), dist.group.WORLD)):
            for name, shape, dtype in json.loads(payload):
                if owners.setdefault(name, rank) != rank:
                    self.skipped |= {name} if rank == dist.get_rank() else set()
                elif rank > 0:
                    self.elsewhere.append(Held(name, shape, DTYPE_NAMES[dtype], rank))
        self.owners = sorted({0, *owners.values()})

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
        mine, count = parameter.tensor, parameter.group.size()
        if not getattr(mine, "tensor_model_parallel", False):
            return mine
        parts = [mine]
        if count > 1:
            parts = [torch.empty_like(mine) for _ in range(count)]
            dist.all_gather(parts, mine.contiguous(), group=parameter.group)
        return self.bridge._weight_merge_across_tp(parameter.name, parts, mine)

    def owned_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what this rank owns, nothing on most ranks; every rank must run it to its end.

        Tensors may be views of the live weights: use or copy them before the next step.
        """
        for name, tensor in self.held_tensors():
            if name not in self.skipped:
                yield name, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the whole model on rank 0 and nothing elsewhere; every rank must run it to its end. As `owned_tensors`."""
        for name, tensor in self.owned_tensors():
            if parallel.is_main_rank():
                yield name, tensor
            else:
                dist.send(tensor.contiguous(), 0)
        for held in self.elsewhere if parallel.is_main_rank() else ():
            tensor = torch.empty(held.shape, dtype=held.dtype, device=parallel.device())
            dist.recv(tensor, held.owner)
            yield held.name, tensor


def exported(name: str, live: Any) -> Parameter | None:
    """How this rank takes part in exporting a parameter of it; None where another data-parallel rank does."""
    if EXPERT_MARK in name:
        replica, group = parallel_state.get_expert_data_parallel_rank(), parallel_state.get_expert_tensor_parallel_group()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        group = parallel_state.get_tensor_model_parallel_group()
    if replica != 0:
        return None
    tensor = live.data
    copy_layout(live, tensor)
    return Parameter(name, tensor, group)


def copy_layout(source: Any, target: Any) -> None:
    """Megatron's marks of how a parameter is split; mbridge reads them when it merges."""
    for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(source, mark):
            setattr(target, mark, getattr(source, mark))

"""The weights as Hugging Face names them: each tensor whole on the one rank that owns it, or all of them gathered to rank 0.

    parameter of this rank --(merge over its tensor-parallel group)--> Hugging Face tensors --> owned, or sent to rank 0

An owner is the first tensor-parallel and data-parallel rank of a pipeline stage, and of each expert-parallel part for its experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer.hf.hf_folder import HfTensor
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.hf_load import EXPERT_MARK, expert_names, tensor_group


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron parameter or buffer of this rank that it helps to export."""

    name: str
    """With the numbers that its layer and its expert have in the whole model."""
    live: torch.Tensor
    """This rank's part."""
    group: Any
    """The ranks that hold the parts of one copy of it; the first of them gets the whole."""


class HfExport:
    """A plan made once and used at each export: which parameters, which names, who owns what. Every rank makes and runs it.

    owners: the global ranks that own tensors, rank 0 first. A name that several hold (tied embeddings) is owned by the first.
    """

    def __init__(self, model: Model) -> None:
        self.hf = model.hf
        live = model.gpt.state_dict(keep_vars=True)  # with buffers that are saved: the router's correction bias
        self.parameters = [part for name, whole in expert_names(model.gpt).items() if (part := exported(whole, live[name]))]
        rank = dist.get_rank()
        mine = [HfTensor(name, tuple(whole.shape), str(whole.dtype)[len("torch.") :], rank) for name, whole in self.held_tensors()]
        self.owned: dict[str, HfTensor] = {}
        for found in chain.from_iterable(parallel.gather(mine, list[HfTensor])):
            self.owned.setdefault(found.name, found)
        self.owners = sorted({0, *(found.rank for found in self.owned.values())})

    def held_tensors(self, first: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank has whole after merging over tensor-parallel groups, by Hugging Face name.

        first: only the groups whose first rank is this one.
        """
        seen = set()
        for parameter in self.parameters:
            if first is not None and dist.get_global_rank(parameter.group, 0) != first:
                continue
            whole = self.hf.merge(parameter.name, self.parts(parameter))
            for name, tensor in zip(self.hf.rule(parameter.name).names, whole, strict=True):
                if name not in seen and parameter.group.rank() == 0:
                    seen.add(name)
                    yield name, tensor

    def parts(self, parameter: Parameter) -> list[torch.Tensor]:
        """What each rank of its group has of the parameter."""
        mine, count = parameter.live.data, parameter.group.size()
        if self.hf.rule(parameter.name).dim is None or count == 1:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(count)]
        dist.all_gather(parts, mine.contiguous(), group=parameter.group)
        return parts

    def owned_tensors(self, first: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what this rank owns, nothing on most ranks; every rank must run it to its end. first: as in `held_tensors`.

        Tensors may be views of the live weights: use or copy them before the next step.
        """
        for name, tensor in self.held_tensors(first):
            if self.owned[name].rank == dist.get_rank():
                yield name, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of the whole model on rank 0 and nothing elsewhere; every rank must run it to its end. As `owned_tensors`.

        One owner after the other, one tensor after the other: no rank has more than one tensor whole at a time.
        """
        for owner in self.owners:
            if owner != 0 and parallel.is_main_rank():
                yield from self.received(owner)
            else:
                for name, tensor in self.owned_tensors(owner):
                    if owner == 0:
                        yield name, tensor
                    else:
                        dist.send(tensor.contiguous(), 0)

    def received(self, owner: int) -> Iterator[tuple[str, torch.Tensor]]:
        """On rank 0: what `owner` sends."""
        for found in self.owned.values():
            if found.rank == owner:
                tensor = torch.empty(found.shape, dtype=getattr(torch, found.dtype), device=parallel.device())
                dist.recv(tensor, owner)
                yield found.name, tensor


def exported(name: str, live: Any) -> Parameter | None:
    """How this rank takes part in exporting a parameter of it; None where another data-parallel rank does."""
    if EXPERT_MARK in name:
        replica = parallel_state.get_expert_data_parallel_rank()
    else:
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return Parameter(name, live, tensor_group(name)) if replica == 0 else None

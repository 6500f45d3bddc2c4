"""The weights as Hugging Face names them: each tensor whole on the one rank that owns it, or all of them gathered to rank 0.

    parameter, in parts on a tensor-parallel group --(gathered on one of them)--> Hugging Face tensors --> owned, or sent to rank 0

The ranks that hold copies or parts of a parameter share the work: those of a pipeline stage, and of its experts those with these experts.
Each owns about as many bytes, and a small model has fewer owners.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trainer.hf.hf_folder import HfTensor
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.hf_load import EXPERT_MARK, expert_names, tensor_group

PART_BYTES = 1 << 30
"""Of weights as published, that an owner has at least where there are several: less is not worth another server and its connections."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron parameter or buffer of this rank that it helps to export."""

    name: str
    """With the numbers that its layer and its expert have in the whole model."""
    live: torch.Tensor
    """This rank's part."""
    group: Any
    """The ranks that hold the parts of one copy of it."""
    owner: int
    """The global rank, of this group, that gets the whole."""


class HfExport:
    """A plan made once and used at each export: which parameters, which names, who owns what. Every rank makes and runs it.

    owners: the global ranks that own tensors, rank 0 first. A name that several hold (tied embeddings) is owned by the first.
    """

    def __init__(self, model: Model) -> None:
        self.hf = model.hf
        live = model.gpt.state_dict(keep_vars=True)  # with buffers that are saved: the router's correction bias
        whole_names = expert_names(model.gpt)
        dense = [(whole, live[name]) for name, whole in whole_names.items() if EXPERT_MARK not in whole]
        experts = [(whole, live[name]) for name, whole in whole_names.items() if EXPERT_MARK in whole]
        ps = parallel_state
        replica, num_replicas = (
            ps.get_data_parallel_rank(with_context_parallel=True),
            ps.get_data_parallel_world_size(with_context_parallel=True),
        )
        parameters = self._dealt(dense, replica, num_replicas)
        parameters += self._dealt(experts, ps.get_expert_data_parallel_rank(), ps.get_expert_data_parallel_world_size())
        mine = [found for parameter in parameters if parameter.owner == dist.get_rank() for found in self._forms(parameter)]
        self.owned: dict[str, HfTensor] = {}
        for of_rank in parallel.gather(mine, list[HfTensor]):
            for found in of_rank:
                self.owned.setdefault(found.name, found)
        self.owners = sorted({0, *(found.rank for found in self.owned.values())})
        owner_of = {name: found.rank for name, found in self.owned.items()}
        self.parameters = [one for one in parameters if owner_of.get(self.hf.rule(one.name).names[0]) == one.owner]

    def _dealt(self, held: Sequence[tuple[str, Any]], replica: int, num_replicas: int) -> list[Parameter]:
        """Of the parameters that all `num_replicas` groups hold a copy of, those that this rank's group exports, each with its owner."""
        if not held:
            return []
        group = tensor_group(held[0][0])
        sizes = [live.numel() * (1 if self.hf.rule(name).dim is None else group.size()) for name, live in held]
        loads = [0] * min(num_replicas * group.size(), max(1, 2 * sum(sizes) // PART_BYTES))
        mine = []
        for (name, live), size in zip(held, sizes, strict=True):
            place = loads.index(min(loads))  # the same on all of them
            loads[place] += size
            if place // group.size() == replica:
                mine.append(Parameter(name, live, group, dist.get_global_rank(group, place % group.size())))
        return mine

    def _forms(self, parameter: Parameter) -> Iterator[HfTensor]:
        """Of the tensors of a parameter that this rank owns."""
        live, count = parameter.live, 1 if self.hf.rule(parameter.name).dim is None else parameter.group.size()
        whole = self.hf.merge(parameter.name, [torch.empty(live.shape, device="meta")] * count)
        for name, tensor in zip(self.hf.rule(parameter.name).names, whole, strict=True):
            yield HfTensor(name, tuple(tensor.shape), str(live.dtype).removeprefix("torch."), parameter.owner)

    def _parts(self, parameter: Parameter) -> list[torch.Tensor]:
        """On its owner: what each rank of its group has of the parameter; nothing elsewhere."""
        mine, group, is_owner = parameter.live.data, parameter.group, parameter.owner == dist.get_rank()
        if self.hf.rule(parameter.name).dim is None or group.size() == 1:
            return [mine] if is_owner else []
        parts = [torch.empty_like(mine) for _ in range(group.size())] if is_owner else []
        dist.gather(mine.contiguous(), parts or None, parameter.owner, group=group)
        return parts

    def owned_tensors(self, owner: int | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of what this rank owns, nothing on some; every rank must run it to its end. owner: of this rank's alone.

        Tensors may be views of the live weights: use or copy them before the next step.
        """
        for parameter in self.parameters:
            if owner in (None, parameter.owner) and (parts := self._parts(parameter)):
                yield from zip(self.hf.rule(parameter.name).names, self.hf.merge(parameter.name, parts), strict=True)

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
        """On rank 0: what `owner` sends, and of what both hold parts first the part here."""
        helped = {self.hf.rule(one.name).names[0]: one for one in self.parameters if one.owner == owner}
        for found in self.owned.values():
            if found.rank == owner:
                if found.name in helped:
                    self._parts(helped[found.name])
                tensor = torch.empty(found.shape, dtype=getattr(torch, found.dtype), device=parallel.device())
                dist.recv(tensor, owner)
                yield found.name, tensor

"""The weights as Hugging Face names them, gathered to rank 0 one tensor at a time."""

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


@dataclass(frozen=True, slots=True)
class Parameter:
    """One megatron parameter of this pipeline stage."""

    name: str
    """With the layer's number in the whole model."""
    tensor: torch.Tensor
    """This rank's part, live."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A Hugging Face tensor that rank 0 receives from another pipeline stage."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    sender: int
    """Its global rank."""


class HfExport:
    """A plan made once and used at each export: which parameters, which names, who sends what. Every rank makes and runs it."""

    def __init__(self, model: Model) -> None:
        self.bridge = model.bridge
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.takes_part = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        gpt = model.gpt
        names = self.bridge._weight_name_mapping_mcore_local_to_global(gpt)
        self.parameters = [Parameter(names[name], tensor.data) for name, tensor in gpt.named_parameters()]
        for parameter, (_, live) in zip(self.parameters, gpt.named_parameters(), strict=True):
            copy_layout(live, parameter.tensor)
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self.incoming: list[Incoming] = []
        self.skipped: set[str] = set()
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            self.plan_stages()

    def plan_stages(self) -> None:
        """Tell every stage what the others hold; a name that two stages hold (tied embeddings) comes from the first."""
        mine = [
            (name, list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in (self.stage_tensors() if self.takes_part else ())
        ]
        group = parallel_state.get_pipeline_model_parallel_group()
        held: set[str] = set()
        for stage, payload in enumerate(parallel.gather_bytes(json.dumps(mine).encode(), group)):
            for name, shape, dtype in json.loads(payload):
                if name in held:
                    self.skipped |= {name} if stage == self.pp_rank else set()
                elif stage > 0:
                    self.incoming.append(Incoming(name, shape, DTYPE_NAMES[dtype], dist.get_global_rank(group, stage)))
                held.add(name)

    @torch.no_grad()
    def stage_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This stage's tensors, whole, by Hugging Face name."""
        seen = set()
        for parameter in self.parameters:
            parts = [parameter.tensor]
            whole = parameter.tensor
            if getattr(parameter.tensor, "tensor_model_parallel", False):
                if self.tp_group.size() > 1:
                    parts = [torch.empty_like(parameter.tensor) for _ in range(self.tp_group.size())]
                    dist.all_gather(parts, parameter.tensor.contiguous(), group=self.tp_group)
                whole = self.bridge._weight_merge_across_tp(parameter.name, parts, parameter.tensor)
            for name, tensor in zip(*self.bridge._weight_to_hf_format(parameter.name, whole), strict=True):
                if name not in seen:
                    seen.add(name)
                    yield name, tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) on rank 0 and nothing elsewhere; every rank must run it to its end.

        Tensors may be views of the live weights: use or copy them before the next step.
        """
        if not self.takes_part:
            return
        is_sender = self.tp_group.rank() == 0
        for name, tensor in self.stage_tensors():
            if self.pp_rank == 0 and is_sender:
                yield name, tensor
            elif self.pp_rank > 0 and is_sender and name not in self.skipped:
                dist.send(tensor.contiguous(), 0)
        if not parallel.is_main_rank():
            return
        for item in self.incoming:
            tensor = torch.empty(item.shape, dtype=item.dtype, device=parallel.device())
            dist.recv(tensor, item.sender)
            yield item.name, tensor


def copy_layout(source: Any, target: Any) -> None:
    """Megatron's marks of how a parameter is split; mbridge reads them when it merges."""
    for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):
        if hasattr(source, mark):
            setattr(target, mark, getattr(source, mark))

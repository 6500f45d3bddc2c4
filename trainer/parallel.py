"""torch.distributed and megatron's parallel state: start, stop, and what ranks tell each other. No pickle crosses ranks here.

The same code runs under torchrun (its environment variables say who is who) and as a single process without it (no port is opened);
gloo where there is no CUDA, NCCL where there is.
"""

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from slimebus.errors import ConfigError
from trainer import cuda_bridge
from trainer.gloo_device import shared_gloo_device
from trainer.settings import ModelSettings

if TYPE_CHECKING:
    import torch

# a rank that has died is noticed after this long
COLLECTIVE_TIMEOUT_S = 1800


def start(settings: ModelSettings) -> None:
    """Join the other ranks and lay out tensor, pipeline, context and data parallelism.

    Raises ConfigError when the ranks do not divide by the layout.
    """
    cuda_bridge.import_megatron()
    import torch
    import torch.distributed as dist

    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check_layout(settings, world_size)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store = dist.HashStore() if world_size == 1 else None
    from megatron.core import parallel_state, tensor_parallel

    with shared_gloo_device():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        parallel_state.initialize_model_parallel(
            settings.tensor_model_parallel_size,
            settings.pipeline_model_parallel_size,
            context_parallel_size=settings.context_parallel_size,
            expert_model_parallel_size=settings.megatron.get("expert_model_parallel_size", 1),
        )
    torch.manual_seed(settings.seed)
    tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)


def check_layout(settings: ModelSettings, world_size: int) -> None:
    """Raise ConfigError unless the ranks divide by TP x PP x CP, and by TP x PP x EP."""
    sizes = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size, settings.context_parallel_size
    model_ranks = sizes[0] * sizes[1] * sizes[2]
    if world_size % model_ranks:
        raise ConfigError(
            f"{world_size} trainer ranks do not divide by {model_ranks} = tensor {sizes[0]} x pipeline {sizes[1]} x context {sizes[2]};"
            f" start a multiple of {model_ranks} with torchrun --nproc-per-node"
        )
    experts = settings.megatron.get("expert_model_parallel_size", 1)
    if world_size % (sizes[0] * sizes[1] * experts):
        raise ConfigError(
            f"{world_size} trainer ranks do not divide by {sizes[0] * sizes[1] * experts} = tensor {sizes[0]} x pipeline {sizes[1]} x "
            f"expert {experts}; start a multiple of that, or lower expert_model_parallel_size"
        )


def stop() -> None:
    """Leave the other ranks. May be called when never started."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def is_main_rank() -> bool:
    """Whether this is rank 0, the one that talks to the broker."""
    import torch.distributed as dist

    return dist.get_rank() == 0


def rank() -> int:
    """This process among all ranks."""
    import torch.distributed as dist

    return dist.get_rank()


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Rank 0's payload on every rank; the others give None."""
    import torch
    import torch.distributed as dist

    if dist.get_world_size() == 1:
        return payload or b""
    size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=device())
    dist.broadcast(size, 0)
    body = torch.frombuffer(bytearray(payload or b"\0"), dtype=torch.uint8).to(device()) if is_main_rank() else None
    if body is None:
        body = torch.empty(max(1, int(size)), dtype=torch.uint8, device=device())
    dist.broadcast(body, 0)
    return body.cpu().numpy().tobytes()[: int(size)]


def gather_bytes(payload: bytes, group: Any) -> list[bytes]:
    """Every rank's payload, in rank order of `group`, on each of its ranks."""
    import torch
    import torch.distributed as dist

    sizes = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(group.size())]
    dist.all_gather(sizes, torch.tensor([len(payload)], dtype=torch.int64, device=device()), group=group)
    width = max(1, max(int(s) for s in sizes))
    mine = torch.zeros(width, dtype=torch.uint8, device=device())
    if payload:
        mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device())
    bodies = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(bodies, mine, group=group)
    return [body.cpu().numpy().tobytes()[: int(size)] for body, size in zip(bodies, sizes, strict=True)]


def sum_over_ranks(values: "torch.Tensor") -> "torch.Tensor":
    """Element-wise sum of `values` over all ranks, in place."""
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def max_over_ranks(values: "torch.Tensor") -> "torch.Tensor":
    """Element-wise maximum of `values` over all ranks, in place."""
    import torch.distributed as dist

    if dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def device() -> "torch.device":
    """Where this rank computes."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

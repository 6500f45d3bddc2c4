"""torch.distributed and megatron's parallel state: start, stop, and what ranks tell each other. No pickle crosses ranks here.

The same code runs as one of several ranks (the environment says who is who) and as a single process (no port is opened);
gloo where there is no CUDA, NCCL where there is. This and all else that imports megatron comes after cpu_compat.import_megatron.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import distributed_c10d

from slimebus.bus.errors import ConfigError
from slimebus.config import RunConfig
from slimebus.config.schema import TrainerConfig
from trainer.arguments.checks import check_layout
from trainer.arguments.megatron_options import expert_ranks
from trainer.arguments.rank_settings import check_agreement

# a rank that has died is noticed after this long
COLLECTIVE_TIMEOUT_S = 1800

Value = TypeVar("Value")


def start(config: RunConfig, settings: Mapping[str, str]) -> None:
    """Join the other ranks and lay out tensor, pipeline, context, expert and data parallelism.

    settings: those that all ranks must share (rank_settings.py). Raises ConfigError on every rank when they do not, and when the ranks do
    not divide by the layout.
    """
    sizes, world_size = config.trainer, int(os.environ.get("WORLD_SIZE", "1"))
    expert_size, expert_tensor_size = expert_ranks(config.megatron)
    check_layout(sizes, world_size, (expert_size, expert_tensor_size))
    if expert_tensor_size > 1 and not torch.cuda.is_available():
        why = "needs NCCL: gloo gathers equal sizes only; leave it out here"
        raise ConfigError(f"megatron.expert_tensor_parallel_size: {expert_tensor_size} {why}")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with shared_gloo_device():
        dist.init_process_group(
            backend,
            store=_store(world_size),
            rank=int(os.environ.get("RANK", "0")),
            world_size=world_size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        )
        try:
            check_agreement(gather(dict(settings), dict[str, str]) if has_others() else [])
        except ConfigError:
            dist.destroy_process_group()
            raise
        parallel_state.initialize_model_parallel(
            sizes.tensor_model_parallel_size,
            sizes.pipeline_model_parallel_size,
            context_parallel_size=sizes.context_parallel_size,
            expert_model_parallel_size=expert_size,
            expert_tensor_parallel_size=expert_tensor_size,
            create_gloo_process_groups=False,
        )
    seed = config.seed + 1  # megatron refuses 0
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _store(world_size: int) -> dist.Store | None:
    """None: rank 0 serves one. torchrun's static nodes keep theirs when ranks start again, with the addresses of the ranks that ended."""
    if world_size == 1:
        return dist.HashStore()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    agents = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)
    return dist.PrefixStore(f"attempt-{os.environ['TORCHELASTIC_RESTART_COUNT']}", agents)


def stop() -> None:
    """Leave the other ranks. May be called when never started."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def is_main_rank() -> bool:
    """Whether this is rank 0, the one that talks to the broker."""
    return dist.get_rank() == 0


def is_first_of_node() -> bool:
    """Whether this rank does what is done once on each node."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


def has_others() -> bool:
    """Whether there is more than one rank."""
    return dist.get_world_size() > 1


def rank() -> int:
    """This process among all ranks."""
    return dist.get_rank()


def broadcast_bytes(payload: bytes | None) -> bytes:
    """Rank 0's payload on every rank; what the others give does not count."""
    size = torch.tensor([len(payload or b"")], device=device())
    dist.broadcast(size, 0)
    body = torch.empty(int(size), dtype=torch.uint8, device=device())
    if payload and is_main_rank():
        body = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device())
    dist.broadcast(body, 0)
    return body.cpu().numpy().tobytes()


def broadcast_value(value: Value | None, form: Any) -> Value:
    """Rank 0's value on every rank; what the others give does not count. form: its type."""
    return msgspec.msgpack.decode(broadcast_bytes(None if value is None else msgspec.msgpack.encode(value)), type=form)


def gather(value: Value, form: Any) -> list[Value]:
    """Every rank's value, in rank order, on each rank. form: its type."""
    return [msgspec.msgpack.decode(payload, type=form) for payload in gather_bytes(msgspec.msgpack.encode(value))]


def gather_bytes(payload: bytes) -> list[bytes]:
    """Every rank's payload, in rank order, on each rank."""
    gathered = [torch.zeros(1, dtype=torch.int64, device=device()) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, torch.tensor([len(payload)], device=device()))
    sizes = torch.cat(gathered).tolist()
    width = max(sizes)
    padded = torch.frombuffer(bytearray(payload.ljust(max(1, width), b"\0")), dtype=torch.uint8).to(device())
    bodies = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(bodies, padded)
    return [body.cpu().numpy().tobytes()[:size] for body, size in zip(bodies, sizes, strict=True)]


def params_dtype(trainer: TrainerConfig) -> torch.dtype:
    """Of the trained parameters: what `trainer.params_dtype` says; auto: bfloat16 on CUDA, float32 on a CPU."""
    if trainer.params_dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return torch.bfloat16 if trainer.params_dtype == "bfloat16" else torch.float32


def device() -> torch.device:
    """Where this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@contextlib.contextmanager
def shared_gloo_device() -> Iterator[None]:
    """Process groups made inside use one gloo device; as always GLOO_SOCKET_IFNAME names its network interface.

    Each device has a thread that wakes up a hundred times a second. Torch makes one for each of Megatron's some twenty groups, so that a
    rank that only waits would use 2.5% of a core (measured); with one device it is 0.2%.
    """
    c10d: Any = distributed_c10d
    if not c10d.is_gloo_available():
        yield
        return
    own: Any = c10d.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [own.create_device(interface=name) for name in interfaces] or [own.create_default_device()]

    class OnSharedDevices(own):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = own._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevices
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = own

"""What megatron-core assumes of CUDA, bridged for machines without it; where CUDA is there only deprecated names are renewed.

`install()` runs before the first `import megatron` and replaces torch names that megatron reads.
`repair_megatron()` runs after it and mends what megatron-core 0.16.1 gets wrong without Transformer Engine.
Both may be called again; the second call does nothing.
"""

import collections
import contextlib
import ctypes
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

CREATORS = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like")
"""Those that megatron calls with device="cuda" or pin_memory."""
MALLOC_OPTIONS = {-3: 1 << 30, -1: (1 << 31) - 1}
"""M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3), in bytes."""
MARK = "_slimebus_cpu_compat"


@contextlib.contextmanager
def library_warnings_ignored() -> Iterator[None]:
    """Ignore what megatron warns of in its own code (each import names Transformer Engine as missing, and old modules).

    Only around imports, building and calls known to warn.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", message="Please use DTensor instead")  # its checkpoints are made of ShardedTensor
        yield


def install() -> None:
    """Let megatron-core run on gloo. Must come before `import megatron`."""
    import torch

    renew_collectives(torch.distributed)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asserted by TP + sequence parallel
    if torch.cuda.is_available() or hasattr(torch, MARK):
        return
    setattr(torch, MARK, True)
    keep_freed_memory()
    # these build their tables of torch names once, and must see the originals
    import torch._dynamo
    from torch.utils._device import _device_constructors

    torch.compile = compiles_nothing  # type: ignore[assignment]  # megatron's jit_fuser; the compiler alone takes 3 s to import
    _device_constructors()  # else `with torch.device("meta")` has no effect, and transformers loads buffers without values
    bridge_devices(torch)
    bridge_collectives(torch.distributed)
    bridge_streams(torch)
    bridge_random_state(torch)


def keep_freed_memory() -> None:
    """Let glibc keep up to 2 GiB that tensors free. By itself it gives large blocks back to the kernel, and the next one of their size is
    thousands of page faults again: 1.5% of the CPU time of a step of 7,600 tokens (10,000 faults).
    """
    with contextlib.suppress(AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in MALLOC_OPTIONS.items():
            mallopt(parameter, value)


def compiles_nothing(function: Any = None, **options: Any) -> Any:
    """As torch.compile, also as a decorator with options: the function as it is."""
    return functools.partial(compiles_nothing, **options) if function is None else function


def import_megatron() -> None:
    """Install the bridge, then import megatron-core without its remarks on what else could be installed."""
    install()
    sys.modules.setdefault("wandb", None)  # type: ignore[arg-type]  # its inference imports it where it can: 1 s of each rank's start
    with library_warnings_ignored():
        import megatron.core
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer  # noqa: F401
    if sys.modules["wandb"] is None:
        del sys.modules["wandb"]


def renew_collectives(dist: Any) -> None:
    """Give torch's new functions their old names, which megatron takes at import and which warn at every call."""
    for old, new in (("all_gather_into_tensor", "all_gather_single"), ("reduce_scatter_tensor", "reduce_scatter_single")):
        if hasattr(dist, new):
            setattr(dist, old, getattr(dist, new))


def bridge_devices(torch: Any) -> None:
    """Read every "cuda" device as the CPU."""
    cpu = torch.device("cpu")

    def creator(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def create(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
                kwargs["device"] = cpu
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return create

    for name in CREATORS:
        setattr(torch, name, creator(getattr(torch, name)))
    tensor, original_type = torch.Tensor, torch.Tensor.type

    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = original_type(self, *args, **kwargs)  # megatron's optimizers compare with 'torch.cuda.FloatTensor'
        return named.replace("torch.", "torch.cuda.", 1) if isinstance(named, str) and self.device.type == "cpu" else named

    tensor.type = type_name
    tensor.cuda = tensor.pin_memory = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.cuda.current_device = lambda: cpu


def bridge_collectives(dist: Any) -> None:
    """Accept splits given as tensors, as NCCL does and gloo does not."""
    all_to_all = dist.all_to_all_single

    def plain(splits: Any) -> Any:
        return splits.tolist() if hasattr(splits, "tolist") else splits

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        return all_to_all(output, input, plain(output_split_sizes), plain(input_split_sizes), *args, **kwargs)

    dist.all_to_all_single = all_to_all_single


class NullCudaObject:
    """A CUDA stream or event on a machine where everything has already happened: each of its methods does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self


def bridge_streams(torch: Any) -> None:
    """One stream, always current, always done."""
    cuda, current = torch.cuda, NullCudaObject()
    cuda.Stream = cuda.Event = NullCudaObject
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: current
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.set_stream = cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = torch.Tensor.record_stream = lambda *args, **kwargs: None


def bridge_random_state(torch: Any) -> None:
    """The "cuda" random state is the CPU's, so that megatron's tracker governs dropout on CPU too."""
    cuda, generator = torch.cuda, torch.default_generator
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *args, **kwargs: generator.get_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *args, **kwargs: generator.set_state(state)
    cuda.manual_seed = cuda.random.manual_seed = lambda seed: generator.manual_seed(seed)
    cuda.default_generators = collections.defaultdict(lambda: generator)
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda._lazy_init = lambda: None
    # its fork() warns that the CPU state changed; here that is the point
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def repair_megatron() -> None:
    """Mend megatron-core 0.16.1 where Transformer Engine is not installed. Call after importing megatron."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # else NameError in every MoE router
    if not hasattr(random, "FP8GlobalStateManager"):  # else NameError when layer norms are recomputed
        random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False, get_fp8_recipe=lambda: None)
        random.fp8_autocast = random.activation_recompute_forward = lambda **kwargs: contextlib.nullcontext()

"""megatron.deterministic_mode: the same batches give the same bits.

On CPUs that is so without it, with the same number of ranks and of trainer.train_threads. On CUDA it takes deterministic kernels, which are
slower; the names are those that torch, cuBLAS, NCCL and Transformer Engine document.
"""

import os
from collections.abc import Mapping
from typing import Any

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def make_deterministic(megatron: Mapping[str, Any]) -> None:
    """Have torch use deterministic kernels only, where the config asks for it; one that has none raises. Before CUDA is initialised."""
    if not megatron.get("deterministic_mode"):
        return
    import torch

    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False

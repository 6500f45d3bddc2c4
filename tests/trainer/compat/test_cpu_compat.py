"""What stands in for CUDA, as a trainer without one starts."""

import os
import subprocess
import sys

import pytest
import torch

PROGRAM = """
import os, sys
from trainer.compat import cpu_compat
cpu_compat.import_megatron()
from megatron.core.jit import jit_fuser
from importlib.util import find_spec
print("torch._inductor.compile_fx" in sys.modules, "wandb" in sys.modules, find_spec("wandb") is not None, jit_fuser(abs) is abs)
print(os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles there")
def test_megatron_is_imported_without_the_compiler_of_torch_and_without_wandb() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True", "1"]  # the last: sequence parallelism asks for one queue


FREED = """
import resource, torch
from trainer.compat import cpu_compat
cpu_compat.install()
faults = []
for made in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(12 << 20)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="tensors are on the device there")
def test_memory_that_a_large_tensor_freed_is_used_again_without_page_faults() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 1000  # 48 MiB that the kernel has to give are 12,000 faults of 4 KiB

"""What stands in for CUDA, as a trainer without one starts."""

import subprocess
import sys

import pytest
import torch

PROGRAM = """
import sys
from trainer.compat import cpu_compat
cpu_compat.import_megatron()
from megatron.core.jit import jit_fuser
from importlib.util import find_spec
print("torch._inductor.compile_fx" in sys.modules, "wandb" in sys.modules, find_spec("wandb") is not None, jit_fuser(abs) is abs)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="compiles there")
def test_megatron_is_imported_without_the_compiler_of_torch_and_without_wandb() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "False", "True", "True"]

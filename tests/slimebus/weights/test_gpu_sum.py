"""Checksums as SGLang makes them on a GPU, against what its own kernel gave in Triton's interpreter."""

import numpy as np
import pytest

from slimebus.weights.gpu_sum import gpu_sum


@pytest.mark.parametrize(("size", "made"), [(3, "c07b2ac5b5610619"), (64, "d79d027934e0f33f"), (100_001, "ee002587760a9182")])
def test_bytes_are_summed_up_as_by_the_kernel_of_sglang(size: int, made: str) -> None:
    assert gpu_sum((np.arange(size) * 7 % 256).astype(np.uint8)) == made

"""16-bit values before and after changes of every kind that the codec tells apart, and the kernels that must agree on them."""

import ctypes

import numpy as np
from hypothesis import strategies as st

from slimebus.weights import kernel_c
from slimebus.weights.kernel import Kernel, load_kernel

EDGE_STEPS = [0, 1, -1, 7, -7, 8, -8, 134, -134, 135, -135, 136, 32767, -32768]
SPECIAL = np.array([0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x0000, 0x8000, 0x7C00, 0xFC01], np.uint16)  # inf, NaN, zeros of both types


def kernels(library: ctypes.CDLL | None = None) -> list[Kernel]:
    """numpy, and the compiled kernel (of `library` where given) at every level that this machine runs."""
    best = kernel_c.CKernel(library) if library else kernel_c.load()
    return [load_kernel("numpy"), *(kernel_c.CKernel(best.library, level) for level in range(best.level + 1 if best else 0))]


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    size = draw(st.integers(0, 3000))
    fraction = draw(st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.4, 0.9, 1.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = np.where(rng.random(size) < 0.1, rng.choice(SPECIAL, size), rng.integers(0, 65536, size)).astype(np.uint16)
    steps = rng.choice(np.array(draw(st.sampled_from([[1, -1], EDGE_STEPS, list(range(-40000, 40000, 977))]))), size)
    return base, (base + np.where(rng.random(size) < fraction, steps, 0)).astype(np.uint16)

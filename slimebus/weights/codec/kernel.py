"""The inner loops of the codec: what a kernel must do, and which one this process uses.

Two exist and give the same bytes: kernel_numpy (the readable reference) and kernel_c (compiled when the package was built).
"""

import functools
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Values = NDArray[np.uint16]
Stream = bytes | Bytes


class Changes(NamedTuple):
    """What a scan found: where values changed, and by how much."""

    gaps: Bytes  # unchanged values before each changed one; 255 skips 255
    codes: Bytes  # 1..14: the zigzag step; 15: see wides
    wides: Bytes  # zigzag step - 15; 255: see escapes
    escapes: Bytes  # differences modulo 2**16, u16 little-endian as bytes


class Kernel(Protocol):
    """The loops over one unit of 16-bit values. Arrays are contiguous; results are valid until the thread's next call."""

    @property
    def name(self) -> str:
        """For people: `numpy`, or `c` with the vector instructions in use."""

    def scan(self, base: Values, target: Values, update: bool) -> Changes:
        """The changes from base to target; with update, base becomes target."""

    def pack(self, codes: Bytes) -> Bytes:
        """Two codes a byte, the first in the low half."""

    def densify(self, num_values: int, changes: Changes) -> Bytes:
        """The codes packed with a 0 for every unchanged value."""

    def apply_sparse(self, values: Values, gaps: Stream, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        """Add the steps to values in place; False with values untouched when the streams do not fit."""

    def apply_dense(self, values: Values, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        """As apply_sparse, with a nibble for every value."""


@functools.cache
def load_kernel() -> Kernel:
    """The compiled kernel where one was built, numpy's elsewhere."""
    from slimebus.weights.codec import kernel_c, kernel_numpy

    return kernel_c.load() or kernel_numpy.NumpyKernel()

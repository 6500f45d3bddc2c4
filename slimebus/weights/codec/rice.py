"""Distances between values that change rarely, as a Rice code: within 1% of their entropy, without a table.

    0     1        5                  5 + ceil(n k / 8)
    +-----+--------+------------------+----------------------------------------+
    | k   | n, u32 | low k bits of n  | for each of n: the rest, as zeros, a 1 |
    +-----+--------+------------------+----------------------------------------+

Bits fill bytes from the highest one; unused bits are 0.
"""

import math

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.codec.kernel import Bytes

HEAD_BYTES = 5
MAX_BITS = 22


def encode(distances: NDArray[np.int64]) -> Bytes:
    """The code of distances [n], at least one, each below 2**22."""
    k = max(0, round(math.log2(1 + float(distances.mean()) * math.log(2)) - 0.5))
    bits = np.zeros(int((distances >> k).sum()) + len(distances), np.uint8)
    bits[np.cumsum((distances >> k) + 1) - 1] = 1
    low = (distances[:, None] >> np.arange(k)[::-1] & 1).astype(np.uint8)
    head = np.frombuffer(bytes([k]) + len(distances).to_bytes(4, "little"), np.uint8)
    return np.concatenate((head, np.packbits(low), np.packbits(bits)))


def decode(code: Bytes) -> NDArray[np.int64] | None:
    """The distances [n]; None for a code that `encode` could not have made. Takes 16 bytes for each byte of the code."""
    k, n = int(code[0]) if len(code) else MAX_BITS + 1, int.from_bytes(code[1:HEAD_BYTES].tobytes(), "little")
    start = HEAD_BYTES + (n * k + 7) // 8
    if k > MAX_BITS or len(code) <= start:
        return None
    ones = np.flatnonzero(np.unpackbits(code[start:]))
    low = np.unpackbits(code[HEAD_BYTES:start])
    if len(ones) != n or ones[-1] // 8 != len(code) - start - 1 or low[n * k :].any():
        return None
    rest = np.diff(ones, prepend=-1) - 1
    return rest << k | low[: n * k].reshape(n, k).astype(np.int64) @ (1 << np.arange(k)[::-1])

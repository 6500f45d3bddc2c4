"""The checksum that SGLang 0.5.23 makes of a tensor on a GPU, computed on a CPU (its kernels/ops/memory/gpu_tensor_hash.py).

words of 32 bits, zeros behind the last bytes, each mixed with its place --> summed up over a tile of 8192 words
that and the size, mixed: 32 bits; twice, with other constants: 64 bits  --> summed up over all tiles, and mixed: the checksum
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE_WORDS = 8192
LANES = ((0x243F6A88, 0x27D4EB2D, 15), (0x243F6A88 * 0x9E3779B1 ^ 0xDEADBEEF, 0x165667B1, 13))
"""Seed, factor of the place and its rotation, for the upper and the lower 32 bits."""
BITS_32, BITS_64 = (1 << 32) - 1, (1 << 64) - 1


def gpu_sum(data: NDArray[np.uint8]) -> str:
    """16 hex digits, of the bytes [N] of a tensor."""
    words = np.concatenate([data, np.zeros(-len(data) % 4, np.uint8)]).view(np.uint32)
    total = sum(_tile_sum(words[start : start + TILE_WORDS], start, len(words)) for start in range(0, len(words), TILE_WORDS))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ (total & BITS_64) >> shift) * factor & BITS_64
    return f"{total ^ total >> 31:016x}"


def _tile_sum(words: NDArray[np.uint32], start: int, num_words: int) -> int:
    place = np.arange(start, start + len(words), dtype=np.uint64).astype(np.uint32)
    found = 0
    for seed, factor, turn in LANES:
        turned = place << np.uint32(turn) | place >> np.uint32(32 - turn)
        mixed = _mix(words ^ (place * np.uint32(factor) + np.uint32(seed & BITS_32)) ^ turned)
        sized = np.array([int(mixed.sum(dtype=np.uint32)) ^ 4 * num_words & BITS_32], np.uint32)
        found = found << 32 | int(_mix(sized)[0])
    return found


def _mix(x: Any) -> Any:
    """MurmurHash3's fmix32, in place."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return x

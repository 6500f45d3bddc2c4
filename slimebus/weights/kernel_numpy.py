"""The reference kernel: the streams of docs/weights.md in numpy, whole arrays at a time."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.kernel import Bytes, Changes, Values

SKIP = 255  # a gap byte that moves on by 255 values and names none
WIDE = 15  # a nibble whose step stands in the wide stream, less WIDE
ESCAPE = 255  # a wide byte whose difference stands in the escape stream


class NumpyKernel:
    """See slimebus.weights.kernel.Kernel."""

    name = "numpy"

    def scan(self, base: Values, target: Values, update: bool) -> Changes:
        positions = np.flatnonzero(base != target)
        values = target.take(positions)
        differences = values - base.take(positions)
        if update:
            base[positions] = values
        steps = _zigzag(differences)
        wide_steps = steps[steps >= WIDE] - WIDE
        escapes = differences[steps >= WIDE + ESCAPE].astype("<u2").view(np.uint8)
        return Changes(_gaps(positions), np.minimum(steps, WIDE).astype(np.uint8), np.minimum(wide_steps, ESCAPE).astype(np.uint8), escapes)

    def pack(self, codes: Bytes) -> Bytes:
        even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
        return cast(Bytes, even[0::2] | even[1::2] << np.uint8(4))

    def densify(self, num_values: int, changes: Changes) -> Bytes:
        codes = np.zeros(num_values, np.uint8)
        codes[_positions(changes.gaps)] = changes.codes
        return self.pack(codes)

    def apply_sparse(self, values: Values, gaps: Bytes, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> bool:
        positions = _positions(gaps)
        if len(gaps) and (gaps[-1] == SKIP or positions[-1] >= len(values)):
            return False
        differences = _differences(len(positions), nibbles, wides, escapes)
        if differences is None:
            return False
        values[positions] += differences
        return True

    def apply_dense(self, values: Values, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> bool:
        differences = _differences(len(values), nibbles, wides, escapes)
        if differences is None:
            return False
        values += differences
        return True


def _gaps(positions: NDArray[np.int64]) -> Bytes:
    """One byte below 255 for each position, after as many SKIP bytes as its distance needs."""
    distances = np.diff(positions, prepend=-1) - 1
    far = np.flatnonzero(distances >= SKIP)  # rare: only these are divided
    gaps = distances.astype(np.uint8)
    gaps[far] = distances[far] % SKIP
    return np.insert(gaps, np.repeat(far, distances[far] // SKIP), SKIP)


def _positions(gaps: Bytes) -> NDArray[np.int64]:
    names_value = gaps != SKIP
    ends = np.cumsum(gaps + names_value.astype(np.int64))
    return cast(NDArray[np.int64], ends[names_value] - 1)


def _differences(num_codes: int, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> Values | None:
    """The difference behind each code; None when the streams do not count each other."""
    if len(nibbles) != (num_codes + 1) // 2:
        return None
    codes = np.stack((nibbles & 15, nibbles >> 4), axis=1).ravel()
    is_wide, is_escape = codes[:num_codes] == WIDE, wides == ESCAPE
    if codes[num_codes:].any() or np.count_nonzero(is_wide) != len(wides) or 2 * np.count_nonzero(is_escape) != len(escapes):
        return None
    wide_differences = _unzigzag(wides.astype(np.uint16) + np.uint16(WIDE))
    wide_differences[is_escape] = np.frombuffer(escapes, "<u2")
    differences = _unzigzag(codes[:num_codes].astype(np.uint16))
    differences[is_wide] = wide_differences
    return differences


def _zigzag(differences: Values) -> NDArray[np.int32]:
    """0, -1, 1, -2, 2, ... become 0, 1, 2, 3, 4, ..."""
    signed = differences.view(np.int16).astype(np.int32)
    return (signed << 1) ^ (signed >> 31)


def _unzigzag(steps: Values) -> Values:
    return (steps >> np.uint16(1)) ^ (np.uint16(0) - (steps & np.uint16(1)))

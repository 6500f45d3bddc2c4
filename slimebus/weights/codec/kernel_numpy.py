"""The reference kernel: the streams of docs/weights.md in numpy, whole arrays at a time."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.codec.kernel import Bytes, Changes, Stream, Values

SKIP = 255  # a gap byte that moves on by 255 values and names none
WIDE = 15  # a nibble whose step stands in the wide stream, less WIDE
ESCAPE = 255  # a wide byte whose difference stands in the escape stream


class NumpyKernel:
    """See slimebus.weights.codec.kernel.Kernel."""

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
        return Changes(
            write_gaps(np.diff(positions, prepend=-1) - 1),
            np.minimum(steps, WIDE).astype(np.uint8),
            np.minimum(wide_steps, ESCAPE).astype(np.uint8),
            escapes,
        )

    def pack(self, codes: Bytes) -> Bytes:
        even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
        return cast(Bytes, even[0::2] | even[1::2] << np.uint8(4))

    def densify(self, num_values: int, changes: Changes) -> Bytes:
        codes = np.zeros(num_values, np.uint8)
        codes[_positions(changes.gaps)] = changes.codes
        return self.pack(codes)

    def apply_sparse(self, values: Values, gaps: Stream, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        jumps, *steps = as_arrays(gaps, nibbles, wides, escapes)
        if not sparse_fits(len(values), jumps, *steps):
            return False
        positions = _positions(jumps)
        values[positions] += _differences(len(positions), *steps)
        return True

    def apply_dense(self, values: Values, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        steps = as_arrays(nibbles, wides, escapes)
        if not codes_fit(len(values), *steps):
            return False
        values += _differences(len(values), *steps)
        return True


def as_arrays(*streams: Stream) -> list[Bytes]:
    """Views of the streams."""
    return [np.frombuffer(stream, np.uint8) for stream in streams]


def sparse_fits(num_values: int, gaps: Bytes, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> bool:
    """Whether the streams of a sparse unit name values within it, with one step each."""
    num_codes = int(np.count_nonzero(gaps != SKIP))
    end = int(gaps.sum(dtype=np.int64)) + num_codes
    ends_on_a_value = len(gaps) == 0 or int(gaps[-1]) != SKIP
    num_zeros = np.count_nonzero(nibbles & 15 == 0) + np.count_nonzero(nibbles >> 4 == 0)
    is_every_one_a_step = num_zeros == num_codes % 2  # the half that is left over
    return ends_on_a_value and end <= num_values and is_every_one_a_step and codes_fit(num_codes, nibbles, wides, escapes)


def codes_fit(num_codes: int, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> bool:
    """Whether there is a nibble for each code, a wide for each nibble that asks for one, and likewise an escape, which is needed."""
    if len(nibbles) != (num_codes + 1) // 2 or (num_codes % 2 and nibbles[-1] > WIDE):
        return False
    num_wides = np.count_nonzero(nibbles & 15 == WIDE) + np.count_nonzero(nibbles >> 4 == WIDE)
    num_escapes = int(np.count_nonzero(wides == ESCAPE))
    if int(num_wides) != len(wides) or 2 * num_escapes != len(escapes):
        return False
    return bool((_zigzag(np.frombuffer(escapes, "<u2")) >= WIDE + ESCAPE).all())


def write_gaps(distances: NDArray[np.int64]) -> Bytes:
    """One byte below 255 for each distance from a changed value to the next, after as many SKIP bytes as it needs."""
    far = np.flatnonzero(distances >= SKIP)  # rare: only these are divided
    gaps = distances.astype(np.uint8)
    gaps[far] = distances[far] % SKIP
    return np.insert(gaps, np.repeat(far, distances[far] // SKIP), SKIP)


def read_gaps(gaps: Bytes) -> NDArray[np.int64]:
    """The distances from each changed value to the next, the first one from the begin."""
    return np.diff(_positions(gaps), prepend=-1) - 1


def _positions(gaps: Bytes) -> NDArray[np.int64]:
    names_value = gaps != SKIP
    ends = np.cumsum(gaps + names_value.astype(np.int64))
    return cast(NDArray[np.int64], ends[names_value] - 1)


def _differences(num_codes: int, nibbles: Bytes, wides: Bytes, escapes: Bytes) -> Values:
    """The difference behind each code, of streams that fit."""
    codes = np.stack((nibbles & 15, nibbles >> 4), axis=1).ravel()[:num_codes]
    wide_differences = _unzigzag(wides.astype(np.uint16) + np.uint16(WIDE))
    wide_differences[wides == ESCAPE] = np.frombuffer(escapes, "<u2")
    differences = _unzigzag(codes.astype(np.uint16))
    differences[codes == WIDE] = wide_differences
    return differences


def _zigzag(differences: Values) -> NDArray[np.int32]:
    """0, -1, 1, -2, 2, ... become 0, 1, 2, 3, 4, ..."""
    signed = differences.view(np.int16).astype(np.int32)
    return (signed << 1) ^ (signed >> 31)


def _unzigzag(steps: Values) -> Values:
    return (steps >> np.uint16(1)) ^ (np.uint16(0) - (steps & np.uint16(1)))

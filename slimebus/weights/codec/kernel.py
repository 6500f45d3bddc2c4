"""The inner loops of the codec: the readable reference in numpy, and kernel.c, compiled when the package was built, with the same bytes.

The compiled one is loaded by ctypes, so that other Python threads run during a call.
"""

import ctypes
import functools
import importlib.util
import math
import sys
import threading
from typing import Any, NamedTuple, cast

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


SKIP = 255  # a gap byte that moves on by 255 values and names none
WIDE = 15  # a nibble with its step in the wide stream, less WIDE
ESCAPE = 255  # a wide byte with its difference in the escape stream


class Kernel:
    """The loops over one unit of 16-bit values, in numpy. Arrays are contiguous; results are valid until the thread's next call."""

    name = "numpy"
    """For people: `numpy`, or `c` with the vector instructions in use."""

    def scan(self, base: Values, target: Values, update: bool) -> Changes:
        """The changes from base to target; with update, base becomes target."""
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
        """Two codes a byte, the first in the low half."""
        even = np.append(codes, np.uint8(0)) if len(codes) % 2 else codes
        return cast(Bytes, even[0::2] | even[1::2] << np.uint8(4))

    def densify(self, num_values: int, changes: Changes) -> Bytes:
        """The codes packed with a 0 for every unchanged value."""
        codes = np.zeros(num_values, np.uint8)
        codes[_positions(changes.gaps)] = changes.codes
        return self.pack(codes)

    def apply_sparse(self, values: Values, gaps: Stream, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        """Add the steps to values in place; False with values untouched when the streams do not fit."""
        jumps, *steps = (np.frombuffer(stream, np.uint8) for stream in (gaps, nibbles, wides, escapes))
        if not sparse_fits(len(values), jumps, *steps):
            return False
        positions = _positions(jumps)
        values[positions] += _differences(len(positions), *steps)
        return True

    def apply_dense(self, values: Values, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        """As apply_sparse, with a nibble for every value."""
        steps = [np.frombuffer(stream, np.uint8) for stream in (nibbles, wides, escapes)]
        if not codes_fit(len(values), *steps):
            return False
        values += _differences(len(values), *steps)
        return True


@functools.cache
def load_kernel() -> Kernel:
    """The compiled kernel where one was built, numpy's elsewhere."""
    return load_compiled() or Kernel()


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


RICE_HEAD_BYTES = 5
MAX_RICE_BITS = 22


def encode_rice(distances: NDArray[np.int64]) -> Bytes:
    """A Rice code of distances [n], at least one, each below 2**22: within 1% of their entropy, without a table.

    0     1        5                  5 + ceil(n k / 8)
    +-----+--------+------------------+----------------------------------------+
    | k   | n, u32 | low k bits of n  | for each of n: the rest, as zeros, a 1 |
    +-----+--------+------------------+----------------------------------------+

    Bits fill bytes from the highest one; unused bits are 0.
    """
    k = max(0, round(math.log2(1 + float(distances.mean()) * math.log(2)) - 0.5))
    bits = np.zeros(int((distances >> k).sum()) + len(distances), np.uint8)
    bits[np.cumsum((distances >> k) + 1) - 1] = 1
    low = (distances[:, None] >> np.arange(k)[::-1] & 1).astype(np.uint8)
    head = np.frombuffer(bytes([k]) + len(distances).to_bytes(4, "little"), np.uint8)
    return np.concatenate((head, np.packbits(low), np.packbits(bits)))


def decode_rice(code: Bytes) -> NDArray[np.int64] | None:
    """The distances [n]; None for a code that `encode_rice` could not have made. Takes 16 bytes for each byte of the code."""
    k, n = int(code[0]) if len(code) else MAX_RICE_BITS + 1, int.from_bytes(code[1:RICE_HEAD_BYTES].tobytes(), "little")
    start = RICE_HEAD_BYTES + (n * k + 7) // 8
    if k > MAX_RICE_BITS or len(code) <= start:
        return None
    ones = np.flatnonzero(np.unpackbits(code[start:]))
    low = np.unpackbits(code[RICE_HEAD_BYTES:start])
    if len(ones) != n or ones[-1] // 8 != len(code) - start - 1 or low[n * k :].any():
        return None
    rest = np.diff(ones, prepend=-1) - 1
    return rest << k | low[: n * k].reshape(n, k).astype(np.int64) @ (1 << np.arange(k)[::-1])


_Place = ctypes.c_char * 0
_STREAMS = ("gaps", "codes", "wides", "escapes")


class _Streams(ctypes.Structure):
    """`streams` of kernel.c: where each begins, then how much each has."""

    _fields_ = [(name, ctypes.c_void_p) for name in _STREAMS] + [(f"num_{name}", ctypes.c_uint64) for name in _STREAMS]


class _Scratch(threading.local):
    """One output area a thread, as large as the largest unit so far; its pages are touched only as far as a scan writes."""

    def __init__(self) -> None:
        self.capacity = -1

    def reserve(self, num_values: int) -> None:
        if num_values <= self.capacity:
            return
        # Each changed value needs at most a gap, a code, a wide and an escape; SKIP bytes stand for 255 unchanged ones each.
        self.gaps = np.empty(num_values + num_values // 255 + 1, np.uint8)
        self.codes = np.empty(num_values, np.uint8)
        self.wides = np.empty(num_values, np.uint8)
        self.escapes = np.empty(2 * num_values, np.uint8)
        self.nibbles = np.empty((num_values + 1) // 2, np.uint8)
        self.streams = _Streams(*(array.ctypes.data for array in (self.gaps, self.codes, self.wides, self.escapes)))
        self.capacity = num_values


class CKernel(Kernel):
    """See Kernel. pack and densify share one output."""

    def __init__(self, library: ctypes.CDLL, level: int | None = None) -> None:
        self.library = library
        self.level: int = library.slimebus_vector_level() if level is None else level
        self.name = "c (avx2)" if self.level else "c (portable)"
        self._scratch = _Scratch()
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        library.slimebus_scan.argtypes = [pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer]
        library.slimebus_pack.argtypes = [pointer, size, pointer]
        library.slimebus_densify.argtypes = [size, pointer, size, pointer, pointer]
        library.slimebus_apply_sparse.argtypes = [pointer, size] * 5
        library.slimebus_apply_dense.argtypes = [pointer, size, pointer, pointer, size, pointer, size]
        for function in (library.slimebus_scan, library.slimebus_pack, library.slimebus_densify):
            function.restype = None

    def scan(self, base: Values, target: Values, update: bool) -> Changes:
        out = self._scratch
        out.reserve(len(base))
        streams = out.streams
        self.library.slimebus_scan(_pointer(base), _pointer(target), len(base), update, self.level, ctypes.byref(streams))
        return Changes(
            out.gaps[: streams.num_gaps],
            out.codes[: streams.num_codes],
            out.wides[: streams.num_wides],
            out.escapes[: 2 * streams.num_escapes],
        )

    def pack(self, codes: Bytes) -> Bytes:
        self._scratch.reserve(len(codes))
        nibbles = self._scratch.nibbles[: (len(codes) + 1) // 2]
        self.library.slimebus_pack(_pointer(codes), len(codes), _pointer(nibbles))
        return nibbles

    def densify(self, num_values: int, changes: Changes) -> Bytes:
        self._scratch.reserve(num_values)
        nibbles, gaps = self._scratch.nibbles[: (num_values + 1) // 2], changes.gaps
        self.library.slimebus_densify(num_values, _pointer(gaps), len(gaps), _pointer(changes.codes), _pointer(nibbles))
        return nibbles

    def apply_sparse(self, values: Values, gaps: Stream, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        if len(escapes) % 2:
            return False
        streams = (_pointer(gaps), len(gaps), _pointer(nibbles), len(nibbles), _pointer(wides), len(wides))
        return not self.library.slimebus_apply_sparse(_pointer(values), len(values), *streams, _pointer(escapes), len(escapes) // 2)

    def apply_dense(self, values: Values, nibbles: Stream, wides: Stream, escapes: Stream) -> bool:
        if len(nibbles) != (len(values) + 1) // 2 or len(escapes) % 2:
            return False
        streams = (_pointer(nibbles), _pointer(wides), len(wides), _pointer(escapes), len(escapes) // 2)
        return not self.library.slimebus_apply_dense(_pointer(values), len(values), *streams)


def load_compiled() -> CKernel | None:
    """The compiled kernel, or None where the package was built without a compiler or the machine is big-endian."""
    spec = importlib.util.find_spec("slimebus.weights.codec._kernel")
    if spec is None or spec.origin is None or sys.byteorder != "little":
        return None
    try:
        return CKernel(ctypes.CDLL(spec.origin))
    except OSError:  # built for another machine
        return None


def _pointer(memory: Stream | Values) -> Any:
    """What ctypes takes for a pointer, in the way that costs least: a model may have many thousand small tensors."""
    if isinstance(memory, bytes):
        return memory
    return _Place.from_buffer(memory.data) if memory.flags.writeable else memory.ctypes.data

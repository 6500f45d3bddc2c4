"""The compiled kernel (kernel.c), loaded by ctypes so that other Python threads run during a call."""

import ctypes
import importlib.util
import sys
import threading
from typing import Any

import numpy as np

from slimebus.weights.codec.kernel import Bytes, Changes, Kernel, Stream, Values

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


def load() -> CKernel | None:
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

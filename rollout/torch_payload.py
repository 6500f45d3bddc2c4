"""Tensors of one file in shared memory, described the way SGLang's /update_weights_from_tensor reads them.

SGLang takes what torch.multiprocessing writes with its file_system strategy: a pickle that names rebuild functions. This writes that
one shape of pickle, opcode by opcode, and imports neither torch nor pickle: nothing here can read one (docs/decisions).

    [(name, rebuild_tensor(rebuild_typed_storage(S, dtype), offset in values, shape, strides)), ...]
    S = rebuild_storage_filename(UntypedStorage, no shm manager of ours, the file's name, its size), once
"""

import base64
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from slimebus.weights.tensors import DTYPE_BYTES

HEADER_BYTES = 64
"""torch keeps a count of the file's users, an int32, in front of the data (its RefcountedMapAllocator)."""
MAX_HANDLE_BYTES = 59
"""What fits into the messages of torch's shm manager."""

PROTOCOL, MARK, TUPLE, LIST, APPENDS, CALL, STOP = b"\x80\x03", b"(", b"t", b"]", b"e", b"R", b"."
REDUCTIONS = "torch.multiprocessing.reductions"
STORAGE_MEMO = 0


class PlacedTensor(NamedTuple):
    """A tensor in a file of tensors. offset: in bytes after the header, a multiple of the dtype's size."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


def payload(handle: str, size_bytes: int, tensors: Iterable[PlacedTensor]) -> str:
    """The base64 text for one tensor-parallel rank. handle: as for shm_open, `/NAME`; size_bytes: without the header."""
    storage = _call(
        _global(REDUCTIONS, "rebuild_storage_filename"),
        _global("torch.storage", "UntypedStorage") + _bytes(b"") + _bytes(handle.encode()) + _int(size_bytes),
    )
    # Rebuilt once and remembered: torch gives up one use of the file each time that it is rebuilt.
    remembered, again = storage + b"q" + bytes([STORAGE_MEMO]), b"h" + bytes([STORAGE_MEMO])
    storages = itertools.chain([remembered], itertools.repeat(again))
    items = [_tuple(_text(tensor.name) + _tensor(storage, tensor)) for storage, tensor in zip(storages, tensors, strict=False)]
    return base64.b64encode(PROTOCOL + LIST + MARK + b"".join(items) + APPENDS + STOP).decode()


def _tensor(storage: bytes, tensor: PlacedTensor) -> bytes:
    typed = _call(_global(REDUCTIONS, "rebuild_typed_storage"), storage + _global("torch", tensor.dtype))
    strides = _strides(tensor.shape)
    place = _int(tensor.offset // DTYPE_BYTES[tensor.dtype]) + _ints(tensor.shape) + _ints(strides)
    return _call(_global("torch._utils", "_rebuild_tensor"), typed + place)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of C order, in values."""
    return tuple(reversed(list(itertools.accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1)))) if shape else ()


def _call(function: bytes, arguments: bytes) -> bytes:
    return function + _tuple(arguments) + CALL


def _tuple(items: bytes) -> bytes:
    return MARK + items + TUPLE


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def _ints(values: Iterable[int]) -> bytes:
    return _tuple(b"".join(map(_int, values)))


def _int(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def _text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def _bytes(value: bytes) -> bytes:
    return b"C" + bytes([len(value)]) + value

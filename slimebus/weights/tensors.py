"""Tensors as bytes, one verified version of them, and the hashes that say so; how the trainer's torch tensors become bytes."""

import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from blake3 import blake3
from numpy.typing import NDArray

from slimebus.bus.errors import FatalWeightsError

if TYPE_CHECKING:
    import torch


NO_BASE = -1
"""In place of a version: there is none."""

NUMPY_DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")
DTYPE_BYTES = {"bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1} | {name: np.dtype(name).itemsize for name in NUMPY_DTYPES}
"""Every dtype that a tensor may have, and the size of a value."""

SAFETENSORS_CODES = {
    name: name.upper().replace("LOAT", "").replace("UINT", "U").replace("INT", "I").removesuffix("FN") for name in DTYPE_BYTES
}
"""What safetensors calls it: BF16, F8_E4M3, F32, U8, I64, BOOL."""
SAFETENSORS_DTYPES = {code: dtype for dtype, code in SAFETENSORS_CODES.items()}
STEPPED_DTYPES = frozenset({"bfloat16", "float16"})
"""The dtypes with changes that travel as steps; all others travel whole."""


class Tensor(NamedTuple):
    """A tensor as its little-endian bytes in C order. buffer: u8, one-dimensional, contiguous."""

    dtype: str
    shape: tuple[int, ...]
    buffer: NDArray[np.uint8]

    @property
    def steps(self) -> NDArray[np.uint16]:
        """The bit patterns of a 16-bit tensor, over the same memory."""
        return self.buffer.view(np.uint16)

    @property
    def num_values(self) -> int:
        return len(self.buffer) // DTYPE_BYTES[self.dtype]


TensorLike = np.ndarray[Any, Any] | tuple[str, tuple[int, ...], Any]
"""What can be published: (dtype, shape, buffer), or an array; an array of uint16 means the bit patterns of bfloat16."""


class TensorForm(NamedTuple):
    """What a tensor is, and the hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str

    @property
    def size(self) -> int:
        """Of the tensor's bytes."""
        return tensor_bytes(self.name, self.dtype, self.shape)

    @property
    def num_values(self) -> int:
        return self.size // DTYPE_BYTES[self.dtype]

    @property
    def kind(self) -> str:
        """dtype and shape, for people."""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"


@dataclass(frozen=True)
class Weights:
    """One verified version. Buffers of unchanged tensors are shared with the version before; treat them as read-only."""

    lineage: str
    version: int
    digest: str
    tensors: Mapping[str, Tensor]
    hashes: Mapping[str, str]

    @property
    def size_bytes(self) -> int:
        return sum(len(tensor.buffer) for tensor in self.tensors.values())

    @property
    def forms(self) -> list[TensorForm]:
        """What the tensors are."""
        return [TensorForm(name, tensor.dtype, tensor.shape, self.hashes[name]) for name, tensor in self.tensors.items()]


MAX_DIMENSIONS = 32
MAX_BYTES = 1 << 62
"""Above any real tensor; they keep the size of a forged shape cheap to compute."""


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor. Raises WeightsError for a name, a dtype or a shape that cannot be."""
    if not name.isprintable():  # a line break would make two models of one digest
        raise FatalWeightsError(f"tensor {name!r} has a name with characters that do not print")
    if dtype not in DTYPE_BYTES:
        raise FatalWeightsError(f"tensor {name!r} has dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_BYTES for size in shape):
        text = f"{list(shape[:8])}{', ...' if len(shape) > 8 else ''}"
        raise FatalWeightsError(f"tensor {name!r} has shape {text}; expected at most {MAX_DIMENSIONS} sizes from 0 to 2^62")
    return math.prod(shape) * DTYPE_BYTES[dtype]


def safetensors_header(forms: Iterable[tuple[str, str, tuple[int, ...]]], alignment: int = 8) -> bytes:
    """All that stands in a safetensors file before these tensors, (name, dtype, shape), which follow in this order without gaps.

    0          8                              a multiple of `alignment`
    +----------+------------------------------+-----------------
    | N, u64   | N bytes: JSON, then spaces   | tensors
    +----------+------------------------------+-----------------
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in forms:
        start, end = end, end + tensor_bytes(name, dtype, shape)
        header[name] = {"dtype": SAFETENSORS_CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def as_tensor(name: str, value: TensorLike) -> Tensor:
    """A view of what was given (a copy only where it is not contiguous). Raises WeightsError where dtype, shape and size disagree."""
    if isinstance(value, np.ndarray):
        dtype = "bfloat16" if value.dtype.newbyteorder("=") == np.uint16 else value.dtype.name
        shape, array = tuple(value.shape), value
    else:
        dtype, given_shape, buffer = value
        shape = tuple(operator.index(size) for size in given_shape)
        array = np.asarray(buffer) if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, np.uint8)
    expected = tensor_bytes(name, dtype, shape)
    tensor = Tensor(dtype, shape, np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8))
    if len(tensor.buffer) != expected:
        has = f"{len(tensor.buffer)} bytes for {tensor.dtype} of shape {list(tensor.shape)}"
        raise FatalWeightsError(f"tensor {name!r}: {has}; expected {expected}")
    return tensor


def hash_bytes(buffer: Any) -> str:
    """BLAKE3 of contiguous memory, as 64 hex digits: nobody can make other bytes that have it. One core hashes some 5 GB/s."""
    view = memoryview(buffer)
    return blake3(view.cast("B") if view.nbytes else b"").hexdigest()


def checksum(buffer: Any) -> str:
    """xxh3_128 as 32 hex digits, three times as fast: finds damage and not malice, so what it finds whole is hashed again."""
    return xxhash.xxh3_128_hexdigest(buffer)


def digest_of(forms: Iterable[TensorForm]) -> str:
    """One hash of a whole version: over `name dtype shape hash` of each tensor, a line each, sorted by name.

    It depends on the tensors alone, so the digest of a model is the same however it is split over publishers.
    """
    ordered = sorted(forms, key=lambda tensor: tensor.name)
    return hash_bytes("".join(f"{t.name} {t.dtype} {','.join(map(str, t.shape))} {t.hash}\n" for t in ordered).encode())


class Target(NamedTuple):
    """The version that a round is about."""

    lineage: str
    version: int


NAN = 0x7FC0


def host_bytes(tensor: "torch.Tensor") -> NDArray[np.uint8]:
    """All bytes of a tensor, on the host, [size]; over its memory where that can be."""
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def canonical(rounded: "torch.Tensor") -> "torch.Tensor":
    """The same bfloat16 tensor, every NaN of it now 0x7FC0, in place: what rounding makes of a NaN depends on device and layout."""
    if rounded.is_cuda or bool(rounded.sum().isnan()):  # on a CPU a sum is cheaper than a mask; on a GPU it would be waited for
        rounded.masked_fill_(rounded.isnan(), float("nan"))
    return rounded


def rounded(tensor: Tensor) -> Tensor:
    """A float32 tensor as bfloat16, rounded to nearest, ties to even, as the trainer publishes it; others as they are. No torch."""
    if tensor.dtype != "float32":
        return tensor
    bits = tensor.buffer.view(np.uint32)
    nearest = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    nearest[is_nan] = NAN
    return Tensor("bfloat16", tensor.shape, nearest.view(np.uint8))

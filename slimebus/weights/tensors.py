"""Tensors as bytes, one verified version of them, and the hashes that say so."""

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from slimebus.errors import WeightsError
from slimebus.weights.kernel import Changes

NO_BASE = -1
"""In place of a version: there is none."""

DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "bool": 1,
}
STEPPED_DTYPES = frozenset({"bfloat16", "float16"})
"""The dtypes whose changes travel as steps; all others travel whole."""


class Tensor(NamedTuple):
    """A tensor as its little-endian bytes in C order. buffer: u8, one-dimensional, contiguous."""

    dtype: str
    shape: tuple[int, ...]
    buffer: NDArray[np.uint8]

    @property
    def steps(self) -> NDArray[np.uint16]:
        """The bit patterns of a 16-bit tensor, over the same memory."""
        return self.buffer.view(np.uint16)

    def array(self) -> NDArray[Any]:
        """A numpy view of the shape; bfloat16 and float8, which numpy lacks, as unsigned integers of their size."""
        unsigned = {1: np.uint8, 2: np.uint16}
        dtype = self.dtype if hasattr(np, self.dtype) or self.dtype == "bool" else unsigned[DTYPE_BYTES[self.dtype]]
        return self.buffer.view(dtype).reshape(self.shape)


class TensorChanges(NamedTuple):
    """A 16-bit tensor as what changed since version `base` of it: `device_codec.scan` of the two."""

    dtype: str
    shape: tuple[int, ...]
    base: int
    units: Sequence[Changes]


TensorLike = np.ndarray[Any, Any] | tuple[str, tuple[int, ...], Any]
"""What can be published: (dtype, shape, buffer), or an array; an array of uint16 means the bit patterns of bfloat16."""


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


MAX_DIMENSIONS = 32
MAX_BYTES = 1 << 62
"""Beyond both nothing real lies; products of a shape that lies stay cheap."""


def tensor_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """The size of a tensor. Raises WeightsError for a name, a dtype or a shape that cannot be."""
    if not name.isprintable():  # a line break would make two models of one digest
        raise WeightsError(f"tensor {name!r} has a name with characters that do not print", retryable=False)
    if dtype not in DTYPE_BYTES:
        raise WeightsError(f"tensor {name!r} has dtype {dtype!r}; expected one of {', '.join(DTYPE_BYTES)}", retryable=False)
    if len(shape) > MAX_DIMENSIONS or any(not 0 <= size <= MAX_BYTES for size in shape):
        text = f"{list(shape[:8])}{', ...' if len(shape) > 8 else ''}"
        raise WeightsError(f"tensor {name!r} has shape {text}; expected at most {MAX_DIMENSIONS} sizes from 0 to 2^62", retryable=False)
    return math.prod(shape) * DTYPE_BYTES[dtype]


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
        raise WeightsError(
            f"tensor {name!r}: {len(tensor.buffer)} bytes for {tensor.dtype} of shape {list(tensor.shape)}; expected {expected}",
            retryable=False,
        )
    return tensor


def hash_bytes(buffer: Any) -> str:
    """xxh3_128 as 32 hex digits: finds damage, not malice; who may speak is for CURVE to say."""
    return xxhash.xxh3_128_hexdigest(buffer)


class Fingerprint(NamedTuple):
    """What a tensor contributes to the digest of its version."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str


class Formed(Protocol):
    """Whatever has a dtype and a shape."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


def version_digest(tensors: Mapping[str, Formed], hashes: Mapping[str, str]) -> str:
    """`digest_of` tensors at hand."""
    return digest_of(Fingerprint(name, tensor.dtype, tensor.shape, hashes[name]) for name, tensor in tensors.items())


def digest_of(fingerprints: Iterable[Fingerprint]) -> str:
    """One hash of a whole version: over `name dtype shape hash` of each tensor, a line each, sorted by name.

    It depends on the tensors alone, so the digest of a model is the same however it is split over publishers.
    """
    ordered = sorted(fingerprints, key=lambda tensor: tensor.name)
    return hash_bytes("".join(f"{t.name} {t.dtype} {','.join(map(str, t.shape))} {t.hash}\n" for t in ordered).encode())

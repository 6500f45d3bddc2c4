"""Samples as arrays, and their form on the wire.

A sample is one trainable token sequence of length T; every token array has that length and entry t speaks of token t:
`rollout_logprobs[t]` is the logprob of `tokens[t]` given what stands before it, `loss_mask[t]` is 1 where token t is trained.
On the wire a group is columnar: one frame per field, the samples' arrays one behind the other.

    tokens            int32  [T]      loss_mask  uint8 [T]      rollout_logprobs  float32 [T]
    any other field   its own dtype and shape per sample (routed experts, teacher logprobs, pixels)
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from slimebus.errors import ProtocolError
from slimebus.messages import NO_VERSION, Field, Put, SampleHeader, Scalar

TOKEN_FIELDS: dict[str, np.dtype[Any]] = {"tokens": np.dtype("<i4"), "loss_mask": np.dtype("u1"), "rollout_logprobs": np.dtype("<f4")}
BITS16 = np.dtype("<u2")
DTYPES = {name: np.dtype(name) for name in ("uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64")}
DTYPES["bfloat16"] = BITS16
"""Names a field may have; bfloat16 crosses as its 16 bits."""


class Sample(msgspec.Struct, kw_only=True):
    """One trainable token sequence. versions: runs (version, length) over the T tokens."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    versions: list[tuple[int, int]]
    reward: float | None = None
    status: str = "completed"
    trajectory: int = 0
    session: str = ""
    turn: int = 0
    metadata: dict[str, Scalar] = {}
    extras: dict[str, np.ndarray] = {}


def oldest_version(versions: Sequence[tuple[int, int]], loss_mask: np.ndarray) -> int:
    """The oldest version among tokens with loss_mask = 1; NO_VERSION when no policy made any of them."""
    start, oldest = 0, NO_VERSION
    for version, length in versions:
        if version != NO_VERSION and (oldest == NO_VERSION or version < oldest) and loss_mask[start : start + length].any():
            oldest = version
        start += length
    return oldest


def check(sample: Sample) -> None:
    """Raise ProtocolError unless every token array has one length T and the version runs cover it."""
    lengths = {name: len(getattr(sample, name)) for name in TOKEN_FIELDS}
    lengths["versions"] = sum(length for _, length in sample.versions)
    if len(set(lengths.values())) != 1:
        raise ProtocolError(f"a sample's token arrays must have one length, got {lengths}")


def header_of(sample: Sample) -> SampleHeader:
    """What the broker may know of a sample."""
    check(sample)
    return SampleHeader(
        num_tokens=len(sample.tokens),
        num_trainable=int(sample.loss_mask.sum()),
        versions=[(int(version), int(length)) for version, length in sample.versions],
        oldest_version=oldest_version(sample.versions, sample.loss_mask),
        status=sample.status,
        reward=sample.reward,
        trajectory=sample.trajectory,
        session=sample.session,
        turn=sample.turn,
        metadata=sample.metadata,
    )


def encode_group(samples: Sequence[Sample]) -> tuple[list[SampleHeader], list[Field], list[bytes]]:
    """Headers, field descriptions and one bulk frame per field. Raises ProtocolError for samples that disagree."""
    headers = [header_of(sample) for sample in samples]
    columns: dict[str, list[np.ndarray]] = {
        name: [np.ascontiguousarray(getattr(s, name), dtype) for s in samples] for name, dtype in TOKEN_FIELDS.items()
    }
    for name in sorted({name for s in samples for name in s.extras}):
        columns[name] = [_extra(s, name) for s in samples]
    fields = [
        Field(name=name, dtype=arrays[0].dtype.name, shapes=[list(a.shape) for a in arrays]) for name, arrays in columns.items() if arrays
    ]
    return headers, fields, [b"".join(a.tobytes() for a in columns[f.name]) for f in fields]


def encode_field(name: str, arrays: Sequence[np.ndarray]) -> tuple[Field, bytes]:
    """One field of a group, an array a sample, and its bulk frame. Raises ProtocolError for a dtype that cannot cross or differs."""
    checked = [_contiguous(name, array) for array in arrays]
    if len({array.dtype for array in checked}) != 1:
        raise ProtocolError(
            f"field {name!r}: {len(checked)} arrays of dtypes {sorted({a.dtype.name for a in checked})}; expected one dtype"
        )
    return Field(name=name, dtype=checked[0].dtype.name, shapes=[list(a.shape) for a in checked]), b"".join(a.tobytes() for a in checked)


def _extra(sample: Sample, name: str) -> np.ndarray:
    if name not in sample.extras:
        raise ProtocolError(f"field {name!r} is missing from a sample; give every sample of a group the same extra fields")
    return _contiguous(name, sample.extras[name])


def _contiguous(name: str, given: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(given).reshape(np.shape(given))  # ascontiguousarray makes [] into [1]
    if array.dtype.name not in DTYPES:
        raise ProtocolError(f"field {name!r} has dtype {array.dtype.name}; expected one of {', '.join(sorted(DTYPES))}")
    return array


def decode_field(field: Field, frame: Any, num_samples: int) -> list[np.ndarray]:
    """The array of each sample, read-only views of `frame`. Raises ProtocolError when the sizes do not agree."""
    dtype = DTYPES.get(field.dtype)
    if dtype is None:
        raise ProtocolError(f"field {field.name!r}: unknown dtype {field.dtype!r}; expected one of {', '.join(sorted(DTYPES))}")
    if len(field.shapes) != num_samples or any(n < 0 for shape in field.shapes for n in shape):
        raise ProtocolError(f"field {field.name!r}: {len(field.shapes)} shapes for {num_samples} samples")
    counts = [math.prod(shape) for shape in field.shapes]
    if sum(counts) * dtype.itemsize != len(frame):
        raise ProtocolError(f"field {field.name!r}: frame of {len(frame)} bytes, its shapes say {sum(counts) * dtype.itemsize}")
    flat = np.frombuffer(frame, dtype)
    ends = np.cumsum(counts, dtype=np.int64).tolist()
    return [flat[end - n : end].reshape(shape) for end, n, shape in zip(ends, counts, field.shapes, strict=True)]


def decode_group(headers: Sequence[SampleHeader], fields: Sequence[Field], frames: Sequence[Any]) -> list[Sample]:
    """The samples of a group from its headers and bulk frames. Raises ProtocolError for anything that does not fit."""
    if len(fields) != len(frames):
        raise ProtocolError(f"{len(frames)} bulk frames for {len(fields)} fields")
    columns = {f.name: decode_field(f, frame, len(headers)) for f, frame in zip(fields, frames, strict=True)}
    missing = TOKEN_FIELDS.keys() - columns.keys()
    if missing:
        raise ProtocolError(f"fields {sorted(missing)} are missing; every group carries {', '.join(TOKEN_FIELDS)}")
    samples = [_sample(header, {name: arrays[i] for name, arrays in columns.items()}) for i, header in enumerate(headers)]
    for sample in samples:
        check(sample)
    return samples


def decode_stored(num_frames: Sequence[int], bulk: Sequence[Any]) -> Iterator[list[Sample]]:
    """The samples of one group after the other. num_frames: how many bulk frames each has, which are a put's message and its own frames.

    Raises ProtocolError as decode_group does.
    """
    start = 0
    for count in num_frames:
        frames = bulk[start : start + count]
        start += count
        record = msgspec.msgpack.decode(frames[0], type=Put)
        yield decode_group(record.samples, record.fields, frames[1:])


def _sample(header: SampleHeader, arrays: Mapping[str, np.ndarray]) -> Sample:
    return Sample(
        **{name: arrays[name] for name in TOKEN_FIELDS},
        versions=header.versions,
        reward=header.reward,
        status=header.status,
        trajectory=header.trajectory,
        session=header.session,
        turn=header.turn,
        metadata=header.metadata,
        extras={name: array for name, array in arrays.items() if name not in TOKEN_FIELDS},
    )

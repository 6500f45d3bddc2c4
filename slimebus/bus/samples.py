"""Samples as arrays, and their form on the wire.

A sample is one trainable token sequence of length T; every token array has that length and entry t speaks of token t:
`rollout_logprobs[t]` is the logprob of `tokens[t]` given what stands before it, `loss_mask[t]` is 1 where token t is trained.
On the wire a group is columnar: a table, then one frame per field (slimebus/bus/sample_table.py).

    tokens            int32  [T]      loss_mask  uint8 [T]      rollout_logprobs  float32 [T]
    any other field   its own dtype and shape per sample (routed experts, teacher logprobs, pixels)
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from slimebus.bus import sample_table
from slimebus.bus.messages import Field, Scalar
from slimebus.bus.sample_table import ITEM_BYTES, TOKEN_FIELDS, BadSamples, CheckedGroup, SampleTable, field_bytes

DTYPES = {name: np.dtype("uint16" if name == "bfloat16" else name).newbyteorder("<") for name in ITEM_BYTES}
"""Those that a field may have; bfloat16 crosses as its 16 bits, and numpy has no such type."""


class SampleRow(msgspec.Struct, kw_only=True):
    """What the table says of a sample of T tokens besides T. versions: runs (version, length) over the tokens.

    trajectory: which of the group's attempts it is a part of; None: as its position says. temperature: that of rollout_logprobs.
    """

    versions: list[tuple[int, int]]
    reward: float | None = None
    status: str = "completed"
    temperature: float = 1.0
    trajectory: int | None = None
    session: str = ""
    turn: int = 0
    metadata: dict[str, Scalar] = {}


class Sample(SampleRow, kw_only=True):
    """One trainable token sequence: its row of the table, arrays of shape [T], and extras of any shape by field name."""

    tokens: np.ndarray
    loss_mask: np.ndarray
    rollout_logprobs: np.ndarray
    extras: dict[str, np.ndarray] = {}


COLUMNS: dict[str, Any] = {"status": "completed", "reward": None, "temperature": 1.0, "session": "", "turn": 0, "metadata": {}}
"""Columns of the table that are left out where every sample has the default."""


def encode_group(samples: Sequence[Sample]) -> list[bytes]:
    """The bulk frames of a group: its table, then one for each field. Raises ProtocolError for samples that disagree."""
    for sample in samples:
        lengths = {name: len(getattr(sample, name)) for name in TOKEN_FIELDS}
        lengths["versions"] = sum(length for _, length in sample.versions)
        if len(set(lengths.values())) != 1:
            raise BadSamples(f"a sample's token arrays must have one length, got {lengths}")
    encoded = []
    for name, dtype in TOKEN_FIELDS.items():
        arrays = [np.ascontiguousarray(getattr(s, name), DTYPES[dtype]) for s in samples]
        encoded.append((Field(name=name, dtype=dtype), _joined(arrays)))
    encoded += [encode_field(name, [_extra(s, name) for s in samples]) for name in sorted({name for s in samples for name in s.extras})]
    columns = {name: [getattr(s, name) for s in samples] for name in COLUMNS}
    trajectories = [i if s.trajectory is None else s.trajectory for i, s in enumerate(samples)]
    table = SampleTable(
        num_tokens=[len(s.tokens) for s in samples],
        versions=[[(int(version), int(length)) for version, length in s.versions if length] for s in samples],
        fields=[field for field, _ in encoded],
        trajectory=[] if trajectories == list(range(len(samples))) else trajectories,
        **{name: values for name, values in columns.items() if any(value != COLUMNS[name] for value in values)},
    )
    return [sample_table.encode_table(table), *(frame for _, frame in encoded)]


def encode_field(name: str, arrays: Sequence[np.ndarray]) -> tuple[Field, bytes]:
    """One field of a group, an array a sample, and its bulk frame. Raises ProtocolError for a dtype that cannot cross or differs."""
    checked = [_contiguous(name, array) for array in arrays]
    if len({array.dtype for array in checked}) != 1:
        raise BadSamples(f"field {name!r}: {len(checked)} arrays of dtypes {sorted({a.dtype.name for a in checked})}; expected one dtype")
    return Field(name=name, dtype=checked[0].dtype.name, shapes=[list(a.shape) for a in checked]), _joined(checked)


def _joined(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)


def _extra(sample: Sample, name: str) -> np.ndarray:
    if name not in sample.extras:
        raise BadSamples(f"field {name!r} is missing from a sample; give every sample of a group the same extra fields")
    return sample.extras[name]


def _contiguous(name: str, given: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(given).reshape(np.shape(given))  # ascontiguousarray makes [] into [1]
    if array.dtype.name not in DTYPES:
        raise BadSamples(f"field {name!r} has dtype {array.dtype.name}; expected one of {', '.join(sorted(DTYPES))}")
    return array


def encode_fields(fields: Mapping[str, Sequence[np.ndarray]]) -> list[bytes]:
    """The bulk frames of late fields, name -> an array a sample: their descriptions, then one frame for each."""
    encoded = [encode_field(name, arrays) for name, arrays in fields.items()]
    return [msgspec.msgpack.encode([field for field, _ in encoded]), *(frame for _, frame in encoded)]


def decode_field(field: Field, frame: Any, num_tokens: Sequence[int]) -> list[np.ndarray]:
    """The array of each sample, read-only views of a frame of the length that its field says."""
    dtype = DTYPES[field.dtype]
    ends = np.cumsum(field_bytes(field, num_tokens), dtype=np.int64) // dtype.itemsize
    parts = np.split(np.frombuffer(frame, dtype), ends[:-1])
    return parts if not field.shapes else [part.reshape(shape) for part, shape in zip(parts, field.shapes, strict=True)]


def decode_arrays(group: CheckedGroup) -> dict[str, list[np.ndarray]]:
    """By field name the array of each sample, read-only views of the frames; bfloat16 as uint16."""
    frames = zip(group.table.fields, group.frames[1:], strict=True)
    return {field.name: decode_field(field, frame, group.table.num_tokens) for field, frame in frames}


def decode_group(frames: Sequence[Any]) -> list[Sample]:
    """The samples of a group from its bulk frames; bfloat16 as float32. Raises ProtocolError for anything that does not fit."""
    group = sample_table.check_group(frames)
    columns = decode_arrays(group)
    for field in group.table.fields:
        if field.dtype == "bfloat16":
            columns[field.name] = [_widened(bits) for bits in columns[field.name]]
    return [_sample(group.table, i, {name: arrays[i] for name, arrays in columns.items()}) for i in range(len(group.samples))]


def _widened(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bfloat16 bit patterns, which are the upper halves of float32's."""
    return np.asarray(bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def decode_stored(num_frames: Sequence[int], bulk: Sequence[Any]) -> Iterator[list[Sample]]:
    """The samples of one group after the other. num_frames: how many bulk frames each has. Raises ProtocolError as decode_group does."""
    start = 0
    for count in num_frames:
        yield decode_group(bulk[start : start + count])
        start += count


def _sample(table: SampleTable, i: int, arrays: Mapping[str, Any]) -> Sample:
    return Sample(
        **{name: arrays[name] for name in TOKEN_FIELDS},
        **{name: column[i] for name in COLUMNS if (column := getattr(table, name))},
        versions=table.versions[i],
        trajectory=table.trajectory[i] if table.trajectory else i,
        extras={name: array for name, array in arrays.items() if name not in TOKEN_FIELDS},
    )

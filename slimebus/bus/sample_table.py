"""The table of a group's samples, and the check that a group can be read by everyone.

    frame 0: table (msgpack map of columns, one entry a sample) | frame 1: field 0 | frame 2: field 1 | ...

S samples, T = num_tokens of one sample. A frame behind the table holds the arrays of sample 0, 1, ... S-1, C order, little-endian.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from slimebus.bus.errors import ProtocolError
from slimebus.bus.messages import NO_VERSION, Field, Scalar, has_failed

MAX_SAMPLES = 100_000
MAX_TABLE_BYTES = 8 << 20
"""Of a put; the descriptions of late fields come on top when it is read."""
MAX_TOKENS = (1 << 31) - 1
"""Of one sample, and the largest dimension of a field."""
MAX_VERSION = (1 << 62) - 1
MAX_FIELDS = 96
"""Of a group, late ones too."""
MAX_LATE_FIELDS = 32
MAX_LATE_BYTES = 128 << 10
"""Of the descriptions in one put_fields."""
MAX_FIELD_NAME = 64
MAX_DIMENSIONS = 8
MAX_ELEMENTS = 1 << 40
"""Of one array, dimensions of 0 counted as 1: NumPy can make every such shape."""
MAX_SESSION_CHARS = 4096
MAX_REWARD = 1e30
"""Sums and differences of such numbers stay finite in float32, their squares in float64."""
LEAST_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Logits of any model stay finite in float32 when they are divided by one of these."""
NUMBERS = ("uint8", "int8", "int16", "uint16", "float16", "int32", "float32", "int64", "float64")
ITEM_BYTES = {name: np.dtype(name).itemsize for name in NUMBERS} | {"bfloat16": 2}
"""The dtypes that a field may have; bfloat16 crosses as its 16 bits."""
TOKEN_FIELDS = {"tokens": "int32", "loss_mask": "uint8", "rollout_logprobs": "float32"}
"""What every group has, each array of shape [T]."""
STATUSES = ("completed", "truncated", "aborted", "failed")

Columns = Meta(max_length=MAX_SAMPLES)
Fields = Annotated[list[Field], Meta(max_length=MAX_FIELDS)]
Length = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Run = tuple[Annotated[int, Meta(ge=NO_VERSION, le=MAX_VERSION)], Annotated[int, Meta(ge=1)]]
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Temperature = Annotated[float, Meta(ge=LEAST_TEMPERATURE, le=MAX_TEMPERATURE)]
Status = Annotated[str, Meta(pattern=f"^({'|'.join(STATUSES)})$")]
Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]


class BadSamples(ProtocolError):
    """Samples that a trainer could not read; the text names the field or sample, what it has and what was expected."""

    code = "bad_samples"


class SampleTable(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Frame 0 of a group: columns of S entries. Of all but the first three, an empty one stands for its default in every sample.

    versions: of each sample, runs (version, length) over its T tokens; NO_VERSION where no policy made them. status: see STATUSES;
    completed. reward: None where there is none, as in a failed sample. temperature: that of the rollout_logprobs; 1.0, also where no engine
    sampled. trajectory: which of the group's num_samples attempts the sample is a part of; sample i of attempt i.
    """

    num_tokens: Annotated[list[Length], Columns]
    versions: Annotated[list[list[Run]], Columns]
    fields: Fields
    status: Annotated[list[Status], Columns] = []
    reward: Annotated[list[Reward | None], Columns] = []
    temperature: Annotated[list[Temperature], Columns] = []
    trajectory: Annotated[list[Length], Columns] = []
    session: Annotated[list[Session], Columns] = []
    turn: Annotated[list[Length], Columns] = []
    metadata: Annotated[list[dict[str, Scalar]], Columns] = []


class SampleFacts(msgspec.Struct, frozen=True, gc=False):
    """What the broker keeps in mind of a sample. oldest_version: over its trained tokens, newest_version: over all; else NO_VERSION."""

    num_tokens: int
    oldest_version: int
    newest_version: int
    reward: float | None
    has_failed: bool


class CheckedGroup(NamedTuple):
    """The frames of a group that everyone can read, with what they say."""

    frames: Sequence[Any]
    table: SampleTable
    samples: list[SampleFacts]

    @property
    def size_bytes(self) -> int:
        """Of all frames."""
        return sum(map(len, self.frames))

    @property
    def extras(self) -> list[str]:
        """Names of the fields beyond the TOKEN_FIELDS."""
        return [field.name for field in self.table.fields if field.name not in TOKEN_FIELDS]


_decoder = msgspec.msgpack.Decoder(SampleTable)
_fields_decoder = msgspec.msgpack.Decoder(Fields)
_encoder = msgspec.msgpack.Encoder()


def encode_table(table: SampleTable) -> bytes:
    """Frame 0. Raises BadSamples when it would be larger than anyone reads."""
    frame = _encoder.encode(table)
    if len(frame) > MAX_TABLE_BYTES:
        raise BadSamples(f"a table of {len(frame)} bytes for {len(table.num_tokens)} samples; at most {MAX_TABLE_BYTES}: less metadata")
    return frame


def decode_table(frame: Any, *, max_bytes: int = MAX_TABLE_BYTES + MAX_LATE_FIELDS * MAX_LATE_BYTES) -> SampleTable:
    """The table of frame 0, its columns as long as they must be. Raises BadSamples."""
    if len(frame) > max_bytes:
        raise BadSamples(f"a table of {len(frame)} bytes; at most {max_bytes}")
    try:
        table = _decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise BadSamples(f"the table of samples in bulk frame 0: {bad}{_value_at(frame, str(bad))}") from None
    count = len(table.num_tokens)
    for name in ("versions", "status", "reward", "temperature", "trajectory", "session", "turn", "metadata"):
        length = len(getattr(table, name))
        if length != count and (length or name == "versions"):
            raise BadSamples(f"the table of samples: column {name!r} has {length} entries for {count} samples (num_tokens)")
    return table


def _value_at(frame: Any, problem: str) -> str:
    """`, got` and the value that a decoder refuses at a place as in `$.reward[0]`; nothing where it names no number's place."""
    found = re.search(r"\$\.(\w+)\[(\d+)\]`$", problem)
    try:
        return f", got {msgspec.msgpack.decode(frame)[found[1]][int(found[2])]!r:.64}" if found else ""
    except (msgspec.DecodeError, TypeError, ValueError, LookupError):  # what stands behind it is malformed too
        return ""


def decode_fields(frames: Sequence[Any]) -> list[Field]:
    """The fields of a put_fields from its frame 0, as many as there are frames behind it, of different names. Raises BadSamples."""
    if frames and len(frames[0]) > MAX_LATE_BYTES:
        raise BadSamples(f"a list of fields of {len(frames[0])} bytes; at most {MAX_LATE_BYTES}")
    try:
        fields = _fields_decoder.decode(frames[0] if frames else b"")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise BadSamples(f"the list of fields in bulk frame 0: {bad}") from None
    if not fields:
        raise BadSamples("no fields; expected at least one")
    check_fields(fields, frames[1:])
    return fields


def check_fields(fields: Sequence[Field], frames: Sequence[Any]) -> None:
    """Raise BadSamples unless there is one frame for each field, and no two fields have one name."""
    if len(frames) != len(fields):
        raise BadSamples(f"{len(frames)} bulk frames behind the first for {len(fields)} fields; expected one each")
    name, count = Counter(field.name for field in fields).most_common(1)[0] if fields else ("", 0)
    if count > 1:
        raise BadSamples(f"field {name[:MAX_FIELD_NAME]!r} stands {count} times")


def oldest_version(versions: Sequence[tuple[int, int]], loss_mask: np.ndarray) -> int:
    """The oldest version among tokens with loss_mask = 1, [T]; NO_VERSION when no policy made any of them. Each run has a token or more."""
    if not loss_mask.any():
        return NO_VERSION
    if len(versions) == 1:
        return versions[0][0]
    made_by, lengths = np.array(versions, np.int64).T
    is_trained = np.add.reduceat(loss_mask, np.cumsum(lengths) - lengths, dtype=np.int64) > 0
    return int(min(made_by[is_trained & (made_by != NO_VERSION)], default=NO_VERSION))


def field_bytes(field: Field, num_tokens: Sequence[int]) -> list[int]:
    """How many bytes the array of each sample takes. Raises BadSamples for a field that nobody can read."""
    where = f"field {field.name[:MAX_FIELD_NAME]!r}"
    if not 0 < len(field.name) <= MAX_FIELD_NAME or not field.name.isascii() or not field.name.isprintable():
        raise BadSamples(f"{where}: its name; expected 1 to {MAX_FIELD_NAME} printable ASCII characters")
    item = ITEM_BYTES.get(field.dtype)
    if item is None:
        raise BadSamples(f"{where}: dtype {field.dtype[:32]!r}; expected one of {', '.join(ITEM_BYTES)}")
    if not field.shapes:
        return [item * length for length in num_tokens]
    if len(field.shapes) != len(num_tokens):
        expected = "expected one each (failed too), or none if all are [T]"
        raise BadSamples(f"{where}: {len(field.shapes)} shapes for {len(num_tokens)} samples; {expected}")
    for i, shape in enumerate(field.shapes):
        is_sound = len(shape) <= MAX_DIMENSIONS and all(0 <= n <= MAX_TOKENS for n in shape)
        if not is_sound or math.prod(n or 1 for n in shape) > MAX_ELEMENTS:
            expected = f"at most {MAX_DIMENSIONS} dimensions of 0 to {MAX_TOKENS}, {MAX_ELEMENTS} elements"
            raise BadSamples(f"{where}, sample {i}: shape {shape[: MAX_DIMENSIONS + 1]}; expected {expected}")
    return [item * math.prod(shape) for shape in field.shapes]


def check_group(frames: Sequence[Any], *, num_samples: int | None = None, newest: int | None = None, max_bytes: int = 0) -> CheckedGroup:
    """The group of these frames, once everything fits that can be seen without the values of its arrays. Raises BadSamples.

    num_samples: of the lease: every attempt 0 .. num_samples - 1 has at least one sample, and there are no others. newest: no token is
    of a newer version. max_bytes: of all frames of a put; 0: they come from the broker, late fields and all.
    """
    if not frames:
        raise BadSamples("no bulk frames; expected the table of samples, then one frame for each field")
    size_bytes = sum(map(len, frames))
    if max_bytes and size_bytes > max_bytes:
        raise BadSamples(f"{size_bytes} bytes in all; at most {max_bytes} can be fetched (broker.max_message_mib)")
    table = decode_table(frames[0], max_bytes=MAX_TABLE_BYTES) if max_bytes else decode_table(frames[0])
    if num_samples is not None:
        _check_attempts(table, num_samples)
    mask = np.zeros(0, np.uint8)
    for field, frame in _fields(table, frames[1:]):
        expected = sum(field_bytes(field, table.num_tokens))
        if len(frame) != expected:
            raise BadSamples(f"field {field.name!r}: a frame of {len(frame)} bytes; its dtype and shapes make {expected}")
        if field.name == "loss_mask":
            mask = np.frombuffer(frame, np.uint8)
    if mask.size and mask.max() > 1:
        raise BadSamples(f"field 'loss_mask': a value of {mask.max()}; expected 0 or 1")
    return CheckedGroup(frames, table, list(_facts(table, mask, newest)))


def _fields(table: SampleTable, frames: Sequence[Any]) -> Iterator[tuple[Field, Any]]:
    """Each field with its frame, once names and token fields are as they must be."""
    check_fields(table.fields, frames)
    by_name = {field.name: field for field in table.fields}
    for name, dtype in TOKEN_FIELDS.items():
        field = by_name.get(name)
        if field is None:
            raise BadSamples(f"field {name!r} is missing; every group has {', '.join(TOKEN_FIELDS)}")
        if field.dtype != dtype:
            raise BadSamples(f"field {name!r}: dtype {field.dtype[:32]!r}; expected {dtype}")
        if field.shapes and field.shapes != [[length] for length in table.num_tokens]:
            raise BadSamples(f"field {name!r}: its shapes are not the [num_tokens] of each sample; leave them out")
    return zip(table.fields, frames, strict=True)


def _check_attempts(table: SampleTable, num_samples: int) -> None:
    made, count = set(table.trajectory or range(len(table.num_tokens))), len(table.num_tokens)
    if made != set(range(num_samples)):
        what = f"{count} samples of {len(made)} attempts (trajectory {min(made, default=0)} to {max(made, default=0)})"
        expected = f"expected one sample or more of each attempt 0 to {num_samples - 1}"
        raise BadSamples(f"{what}; the lease is of {num_samples}: {expected}")


def _facts(table: SampleTable, mask: np.ndarray, newest: int | None) -> Iterator[SampleFacts]:
    start = 0
    for i, (length, runs) in enumerate(zip(table.num_tokens, table.versions, strict=True)):
        if sum(run for _, run in runs) != length:
            raise BadSamples(f"sample {i}: version runs {str(runs[:8])[:80]} for {length} tokens; expected [version, length] over all")
        newest_made = max((version for version, _ in runs), default=NO_VERSION)
        if newest is not None and newest_made > newest:
            raise BadSamples(f"sample {i}: tokens of version {newest_made}, but {newest} is the newest published")
        oldest = oldest_version(runs, mask[start : start + length])
        start += length
        reward = table.reward[i] if table.reward else None
        failed = has_failed(table.status[i] if table.status else "completed", reward, oldest)
        yield SampleFacts(length, oldest, newest_made, reward, failed)

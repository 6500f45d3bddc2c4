"""Groups as files: jsonl with one sample a line, and safetensors with one array for each group, sample and field.

Both carry everything that `slimebus buffer import` needs. A group without samples is one line (jsonl) or an entry of the metadata
(safetensors) with its prompt alone. JSON has no NaN and no infinity: in arrays they are the strings "nan", "inf" and "-inf".
"""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from broker.buffer.reader import Moment, Samples
from broker.state.groups import Group
from broker.store.interface import Damaged
from slimebus.errors import ProtocolError, UsageError
from slimebus.samples import decode_field

SAFETENSORS_DTYPES = {
    "uint8": "U8",
    "int8": "I8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
}


class Exported(msgspec.Struct):
    """What an export wrote, and the groups whose damaged records it left out, by id."""

    groups: int = 0
    samples: int = 0
    left_out: dict[str, str] = {}


def export_jsonl(moment: Moment, groups: Iterator[Group], file: BinaryIO) -> Exported:
    """Write one line for each sample, and one for each group without samples."""
    done = Exported()
    for group, prompt, samples in _whole(moment, groups, done):
        about = {"group": group.id, **about_of(group), "prompt": prompt}
        if samples is None:
            file.write(msgspec.json.encode({**about, "sample": None}) + b"\n")
            continue
        columns = {f.name: decode_field(f, frame, len(samples.header.samples)) for f, frame in _fields(samples)}
        dtypes = {field.name: field.dtype for field in samples.header.fields}
        for i, header in enumerate(samples.header.samples):
            arrays = {name: _listed(parts[i]) for name, parts in columns.items()}
            row = {**about, "sample": i, **msgspec.to_builtins(header), "dtypes": dtypes, "fields": arrays}
            file.write(msgspec.json.encode(row) + b"\n")
        done.samples += len(samples.header.samples)
    return done


def export_safetensors(moment: Moment, groups: Iterator[Group], path: Path) -> Exported:
    """Write arrays named GROUP/SAMPLE/FIELD; the groups, prompts and sample headers are JSON in the metadata `slimebus`."""
    done = Exported()
    tensors: dict[str, Any] = {}
    rows, end = [], 0
    with path.with_name(path.name + ".arrays").open("w+b") as data:
        for group, prompt, samples in _whole(moment, groups, done):
            headers = [] if samples is None else samples.header.samples
            rows.append({"group": group.id, **about_of(group), "prompt": prompt, "samples": msgspec.to_builtins(headers)})
            for field, frame in () if samples is None else _fields(samples):
                start = end
                for i, array in enumerate(decode_field(field, frame, len(headers))):
                    name, kind = f"{group.id}/{i}/{field.name}", SAFETENSORS_DTYPES[field.dtype]
                    tensors[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}
                    start += array.nbytes
                data.write(frame)
                end += len(frame)
            done.samples += len(headers)
        header = json.dumps({"__metadata__": {"slimebus": msgspec.json.encode(rows).decode()}, **tensors}).encode()
        header += b" " * (-len(header) % 8)
        _join(path, header, data)
    path.with_name(path.name + ".arrays").unlink()
    return done


def _join(path: Path, header: bytes, data: BinaryIO) -> None:
    data.seek(0)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        while chunk := data.read(1 << 20):
            file.write(chunk)


def _whole(moment: Moment, groups: Iterator[Group], done: Exported) -> Iterator[tuple[Group, Any, Samples | None]]:
    """Each group with its prompt and samples; one whose records are damaged is left out and named."""
    for group in groups:
        try:
            found = group, moment.prompt(group.id), moment.samples(group.id)
            for field, frame in () if found[2] is None else _fields(found[2]):
                decode_field(field, frame, len(found[2].header.samples) if found[2] else 0)
        except (Damaged, ProtocolError, msgspec.DecodeError) as bad:
            done.left_out[group.id] = str(bad)
            continue
        done.groups += 1
        yield found


def _fields(samples: Samples) -> Iterator[tuple[Any, memoryview]]:
    yield from zip(samples.header.fields, samples.frames, strict=True)


def about_of(group: Group) -> dict[str, Any]:
    """What a person may want to know of a group, in every listing and export."""
    return {
        "state": group.phase,
        "kind": group.kind,
        "reason": group.reason,
        "position": group.position,
        "attempt": group.attempt,
        "failures": group.failures,
        "worker": group.worker,
        "lineage": group.lineage,
        "step": group.step,
        "num_samples": group.num_samples,
        "num_failed": group.num_failed,
        "num_tokens": group.num_tokens,
        "size_bytes": group.size_bytes,
        "oldest_version": group.oldest_version,
        "newest_version": group.newest_version,
    }


def _listed(array: np.ndarray) -> Any:
    values = array.tolist()
    return _finite(values) if array.dtype.kind == "f" and not np.isfinite(array).all() else values


def _finite(values: Any) -> Any:
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else str(values)


def writer_of(path: Path, kind: str) -> str:
    """jsonl or safetensors: as asked, or by the file's name. Raises UsageError."""
    found = kind or {".jsonl": "jsonl", ".safetensors": "safetensors"}.get(path.suffix, "")
    if not found:
        raise UsageError(f"{path}: neither .jsonl nor .safetensors; name the file so, or give --format")
    return found

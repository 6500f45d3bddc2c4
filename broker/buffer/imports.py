"""Groups from files that `slimebus buffer export` wrote, or prompts from any jsonl file of prompts."""

import json
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from broker.buffer.export import SAFETENSORS_DTYPES
from broker.state.edits import IMPORTED
from slimebus.errors import DataError, ProtocolError, UsageError
from slimebus.messages import NO_VERSION, Field, Import, SampleHeader
from slimebus.samples import DTYPES, check, decode_group

MAX_HEADER_BYTES = 1 << 30
MAX_LINE_BYTES = 1 << 30


class Incoming(msgspec.Struct):
    """One group to import: the message and its bulk frames."""

    message: Import
    frames: list[bytes]


def read_groups(path: Path, kind: str, *, prompts_only: bool = False, as_version: int | None = None) -> Iterator[Incoming]:
    """The groups of a file, each checked. Raises DataError naming file, line or group, and reason.

    prompts_only: leave the samples out. as_version: have every token that a policy made count as made by this version.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    rows = _jsonl(path) if kind == "jsonl" else _safetensors(path)
    for place, name, prompt, lineage, headers, columns in rows:
        if prompts_only or not headers:
            headers, columns = [], {}
        yield _incoming(place, name, prompt, lineage, _relabelled(headers, as_version), columns)


Row = tuple[str, str, Any, str, list[SampleHeader], dict[str, tuple[str, list[np.ndarray]]]]


def _incoming(
    place: str, name: str, prompt: Any, lineage: str, headers: list[SampleHeader], columns: dict[str, tuple[str, list[np.ndarray]]]
) -> Incoming:
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt"), str | list):
        raise DataError(f"{place}: group {name!r} has no prompt; expected text, or a list of chat messages, under 'prompt'")
    fields = [Field(name=f, dtype=dtype, shapes=[list(a.shape) for a in arrays]) for f, (dtype, arrays) in columns.items()]
    frames = [b"".join(a.tobytes() for a in arrays) for _, arrays in columns.values()]
    try:
        for sample in decode_group(headers, fields, frames) if headers else ():
            check(sample)
    except ProtocolError as bad:
        raise DataError(f"{place}: group {name!r}: {bad.text}") from None
    group = name if name.startswith(IMPORTED) else IMPORTED + name
    return Incoming(Import(group=group, lineage=lineage, samples=headers, fields=fields), [msgspec.msgpack.encode(prompt), *frames])


def _relabelled(headers: list[SampleHeader], version: int | None) -> list[SampleHeader]:
    if version is None:
        return headers
    return [
        msgspec.structs.replace(
            h,
            versions=[(v if v == NO_VERSION else version, n) for v, n in h.versions],
            oldest_version=h.oldest_version if h.oldest_version == NO_VERSION else version,
        )
        for h in headers
    ]


# --- jsonl ---


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        rows = ((number, _line(path, number, line)) for number, line in enumerate(file, 1) if line.strip())
        for name, lines in groupby(rows, key=lambda row: _name(path, *row)):
            yield _group(path, name, list(lines))


def _group(path: Path, name: str, lines: list[tuple[int, dict[str, Any]]]) -> Row:
    number, first = lines[0]
    samples = [(f"{path}:{number}", row) for number, row in lines if row.get("sample") is not None]
    headers = [_header(place, row) for place, row in samples]
    dtypes: dict[str, str] = samples[0][1].get("dtypes", {}) if samples else {}
    columns = {field: (dtype, [_array(place, field, dtype, row) for place, row in samples]) for field, dtype in dtypes.items()}
    prompt = first.get("prompt")
    if not isinstance(prompt, dict):
        prompt = {"prompt": prompt, "label": first.get("label"), "metadata": first.get("metadata") or {}}
    return f"{path}:{number}", name, prompt, str(first.get("lineage") or ""), headers, columns


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES:
        raise DataError(f"{path}:{number}: a line of {len(line)} bytes; at most {MAX_LINE_BYTES}")
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        raise DataError(f"{path}:{number}: not JSON: {bad}") from None
    if not isinstance(row, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, got {type(row).__name__}")
    return row


def _name(path: Path, number: int, row: dict[str, Any]) -> str:
    """The group of a line; lines of a plain prompt file are named by file and line."""
    return str(row["group"]) if "group" in row else f"{path.name}/{number}"


def _header(place: str, row: dict[str, Any]) -> SampleHeader:
    try:
        return msgspec.convert(row, SampleHeader)
    except msgspec.ValidationError as bad:
        raise DataError(f"{place}: not a sample as `slimebus buffer export` writes it: {bad}") from None


def _array(place: str, field: str, dtype: str, row: dict[str, Any]) -> np.ndarray:
    if dtype not in DTYPES:
        raise DataError(f"{place}: field {field!r}: unknown dtype {dtype!r}; expected one of {', '.join(sorted(DTYPES))}")
    try:
        values = row["fields"][field]
        return np.asarray(values, DTYPES[dtype]) if DTYPES[dtype].kind != "f" else np.asarray(values, object).astype(DTYPES[dtype])
    except (KeyError, TypeError, ValueError, OverflowError) as bad:
        raise DataError(f"{place}: field {field!r} is not an array of {dtype}: {bad}") from None


# --- safetensors ---


def _safetensors(path: Path) -> Iterator[Row]:
    names = {short: name for name, short in SAFETENSORS_DTYPES.items()}
    with path.open("rb") as file:
        tensors, rows, start = _safetensors_header(path, file)
        for row in rows:
            name = str(row.get("group"))
            headers = [_header(f"{path}: group {name!r}", sample) for sample in row.get("samples", [])]
            prefix = f"{name}/0/"
            columns = {}
            for field in [key[len(prefix) :] for key in tensors if key.startswith(prefix)] if headers else []:
                parts = [tensors[key] for i in range(len(headers)) if (key := f"{name}/{i}/{field}") in tensors]
                if len(parts) != len(headers):
                    raise DataError(f"{path}: group {name!r}: field {field!r} is missing from a sample")
                dtype = names.get(parts[0]["dtype"], "?")
                columns[field] = (dtype, [_tensor(path, file, start, dtype, part) for part in parts])
            yield str(path), name, row.get("prompt"), str(row.get("lineage") or ""), headers, columns


def _safetensors_header(path: Path, file: Any) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    try:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        header = json.loads(file.read(size))
        rows = json.loads(header.pop("__metadata__")["slimebus"])
    except (struct.error, ValueError, KeyError, TypeError) as bad:
        raise DataError(f"{path}: not a safetensors file that `slimebus buffer export` wrote: {bad}") from None
    return header, rows, 8 + size


def _tensor(path: Path, file: Any, start: int, dtype: str, described: Any) -> np.ndarray:
    try:
        first, end = described["data_offsets"]
        file.seek(start + first)
        return np.frombuffer(file.read(end - first), DTYPES[dtype]).reshape(described["shape"])
    except (KeyError, TypeError, ValueError) as bad:
        raise DataError(f"{path}: an array does not fit its description: {bad}") from None

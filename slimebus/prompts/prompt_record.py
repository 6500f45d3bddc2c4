"""Prompt data, checked: one line of JSON, or one map, becomes the record that travels to workers.

A record is a msgpack map {prompt, label, metadata}: the prompt is text or a list of chat messages, the label anything, the metadata a
map with text keys. Tools of a chat prompt stand in its metadata under `tools`.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from slimebus.bus.errors import DataError

MAX_RECORD_BYTES = 16 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_KEYS = 12

_decoder = msgspec.json.Decoder(dict)
MAX_PLAIN_BYTES = 1 << 20
Scalar = str | Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | float | bool | None
PLAIN: list[tuple[str, Any] | tuple[str, Any, Any]] = [
    ("prompt", Annotated[str, msgspec.Meta(min_length=1)]),
    ("label", Scalar, None),
    ("metadata", dict[str, Scalar] | None, None),
]
"""The fields of a line with values that surely make a record."""


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line keeps what. `tools` is empty when prompts have no tools. environment: that of the run (verifiers_tasks.py)."""

    prompt: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"
    tools: str = ""
    environment: str = ""


class LineReader:
    """Reads lines of JSON that keep prompt, label, metadata and tools under these keys."""

    def __init__(self, keys: PromptKeys) -> None:
        self.keys = keys
        names = {"prompt": keys.prompt, "label": keys.label, "metadata": keys.metadata}
        self._plain = msgspec.json.Decoder(msgspec.defstruct("PlainLine", PLAIN, rename=names)) if _are_plain(keys) else None
        self._marks = [json.dumps(key).encode() for key in {keys.prompt, keys.label, keys.metadata, keys.tools} - {""}]

    def fields(self, line: bytes) -> dict[str, Any]:
        """The map of a line, not checked yet. Raises DataError with the reason alone; the caller knows file and line."""
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"a line of more than {MAX_RECORD_BYTES} bytes")
        try:
            fields: dict[str, Any] = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
            raise DataError(_why_not_json(line, bad)) from None
        for mark in self._marks:
            if line.count(mark) > 1:
                json.loads(line, object_pairs_hook=_unique)
        return fields

    def check(self, line: bytes) -> None:
        """Raise DataError unless `record` makes a record of the line; a third of its time where all values are text or numbers."""
        is_plain = self._plain is not None and len(line) <= MAX_PLAIN_BYTES
        for mark in self._marks:
            is_plain = is_plain and line.count(mark) < 2
        try:
            if is_plain:
                self._plain.decode(line)  # type: ignore[union-attr]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            is_plain = False
        if not is_plain:
            self.record(line)

    def record(self, line: bytes) -> bytes:
        """The record of a line. Raises DataError like `fields`, and like `record_of`."""
        return record_of(self.fields(line), self.keys)


def _are_plain(keys: PromptKeys) -> bool:
    return not keys.tools and len({keys.prompt, keys.label, keys.metadata}) == 3


def check_fields(fields: dict[str, Any], keys: PromptKeys) -> None:
    """Raise DataError unless prompt, metadata and tools are what a worker can use."""
    _check_prompt(fields, keys.prompt)
    metadata = fields.get(keys.metadata)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(key, str) for key in metadata)):
        raise DataError(f"{keys.metadata!r} must be an object, got {_kind(metadata)}")
    if keys.tools and fields.get(keys.tools) is not None:
        tools = fields[keys.tools]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{keys.tools!r} must be a list of tool objects, got {_kind(tools)}")


def record_of(fields: dict[str, Any], keys: PromptKeys) -> bytes:
    """The record of a map. Raises DataError for what a worker cannot use, what msgpack cannot hold, or more than 16 MiB."""
    check_fields(fields, keys)
    metadata = fields.get(keys.metadata) or {}
    if keys.tools and fields.get(keys.tools):
        metadata = {**metadata, "tools": fields[keys.tools]}
    values = {"prompt": fields[keys.prompt], "label": fields.get(keys.label), "metadata": metadata}
    try:
        record = msgspec.msgpack.encode(values, enc_hook=plain)
    except (TypeError, ValueError, OverflowError, RecursionError) as bad:
        raise DataError(f"cannot be kept: {bad}") from None
    if len(record) > MAX_RECORD_BYTES:
        raise DataError(f"a prompt of {len(record)} bytes; at most {MAX_RECORD_BYTES}")
    return record


def plain(value: Any) -> Any:
    """A numpy or torch scalar as Python's own, for msgspec. Raises TypeError for anything else."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def check_record(record: Any) -> None:
    """Raise DataError unless these bytes are a record, as `record_of` makes them."""
    if len(record) > MAX_RECORD_BYTES:
        raise DataError(f"a prompt of {len(record)} bytes; at most {MAX_RECORD_BYTES}")
    try:
        fields = msgspec.msgpack.decode(record, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise DataError(f"not a msgpack map with text keys: {bad}") from None
    check_fields(fields, PromptKeys())


def _check_prompt(fields: dict[str, Any], key: str) -> None:
    prompt = fields.get(key)
    if prompt and isinstance(prompt, str):
        return
    if key not in fields:
        shown = ", ".join(repr(name[:64]) for name in list(fields)[:SHOWN_KEYS])
        raise DataError(f"no {key!r} (input_key); it has {shown or 'nothing'}")
    if not prompt or not isinstance(prompt, list):
        got = {"str": "empty text", "list": "an empty list"}.get(type(prompt).__name__, _kind(prompt))
        raise DataError(f"{key!r} must be text or a list of chat messages, got {got}")
    for number, message in enumerate(prompt, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError(f"{key!r}: message {number} must be an object with a 'role', got {_kind(message)}")


def _why_not_json(line: bytes, bad: Exception) -> str:
    if isinstance(bad, msgspec.ValidationError):
        return f"expected a JSON object, got {_kind_of_text(line)}"
    if line[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "not JSON: the file is UTF-16; save it as UTF-8"
    try:
        json.loads(line, parse_constant=_refuse_constant)
    except UnicodeDecodeError as text:
        return f"not JSON: {text}"
    except (ValueError, RecursionError) as better:
        return f"not JSON: {better}"
    return f"not JSON: {bad}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number; write null")


def _kind_of_text(line: bytes) -> str:
    try:
        return _kind(msgspec.json.decode(line))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "something else"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names: dict[type, str] = {dict: "an object", list: "list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DataError(f"the key {twice!r} stands twice in one object; which one is meant?")
    return found

"""Prompt data, checked: one line of JSON, or one map, becomes the record that travels to workers.

A record is a msgpack map {prompt, label, metadata}: the prompt is text or a list of chat messages, the label anything, the metadata a
map with text keys. Tools of a chat prompt stand in its metadata under `tools`.
"""

import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec

from slimebus.errors import DataError

MAX_RECORD_BYTES = 16 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_KEYS = 12

_decoder = msgspec.json.Decoder(dict)


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Where a line keeps what. `tools` is empty when prompts have no tools."""

    prompt: str = "prompt"
    label: str = "label"
    metadata: str = "metadata"
    tools: str = ""


class LineReader:
    """Reads lines of JSON that keep prompt, label, metadata and tools under these keys."""

    def __init__(self, keys: PromptKeys) -> None:
        self.keys = keys
        self._plain, self._encoder, self._buffer = _plain_decoder(keys), msgspec.msgpack.Encoder(), bytearray()
        self._marks = [json.dumps(key).encode() for key in {keys.prompt, keys.label, keys.metadata, keys.tools} - {""}]

    def fields(self, line: bytes) -> dict[str, Any]:
        """The checked map of a line. Raises DataError with the reason alone; the caller knows file and line."""
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"a line of more than {MAX_RECORD_BYTES} bytes")
        try:
            fields: dict[str, Any] = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
            raise DataError(_why_not_json(line, bad)) from None
        for mark in self._marks:
            if line.count(mark) > 1:
                _check_unique(line)
        check_fields(fields, self.keys)
        return fields

    def record(self, line: bytes) -> bytes:
        """The record of a line. Raises DataError like `fields`."""
        return record_of(self.fields(line), self.keys)

    def check(self, line: bytes) -> None:
        """Raise what `record` would raise; three times as fast for lines with a prompt of text."""
        if not self._is_plainly_good(line):
            self.record(line)

    def _is_plainly_good(self, line: bytes) -> bool:
        if self._plain is None or len(line) > MAX_RECORD_BYTES // 2 or not line.isascii():
            return False
        for mark in self._marks:
            if line.count(mark) > 1:
                return False
        try:
            self._encoder.encode_into(self._plain.decode(line), self._buffer)
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
            return False
        return True


def _plain_decoder(keys: PromptKeys) -> "msgspec.json.Decoder[Any] | None":
    """A decoder that only takes lines whose prompt is text; None when a key serves twice."""
    types: dict[str, Any] = {
        "prompt": Annotated[str, msgspec.Meta(min_length=1)],
        "label": (Any, None),
        "metadata": (dict[str, Any] | None, None),
        "tools": (list[dict[str, Any]] | None, None),
    }
    names = {name: getattr(keys, name) for name in types if getattr(keys, name)}
    if len(set(names.values())) != len(names):
        return None
    fields = [(name, types[name]) if name == "prompt" else (name, *types[name]) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("PlainLine", fields, rename=names, gc=False))


def check_fields(fields: dict[str, Any], keys: PromptKeys) -> None:
    """Raise DataError unless prompt, metadata and tools are what a worker can use."""
    prompt = fields.get(keys.prompt)
    if not (isinstance(prompt, str) and prompt):
        _check_prompt(fields, keys.prompt)
    metadata = fields.get(keys.metadata)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(key, str) for key in metadata)):
        raise DataError(f"{keys.metadata!r} must be an object, got {_kind(metadata)}")
    if keys.tools and fields.get(keys.tools) is not None:
        tools = fields[keys.tools]
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError(f"{keys.tools!r} must be a list of tool objects, got {_kind(tools)}")


def record_of(fields: dict[str, Any], keys: PromptKeys) -> bytes:
    """The record of checked fields. Raises DataError for what msgpack cannot hold, or more than 16 MiB."""
    metadata = fields.get(keys.metadata) or {}
    if keys.tools and fields.get(keys.tools):
        metadata = {**metadata, "tools": fields[keys.tools]}
    try:
        record = msgspec.msgpack.encode({"prompt": fields[keys.prompt], "label": fields.get(keys.label), "metadata": metadata})
    except (TypeError, ValueError, OverflowError, RecursionError) as bad:
        raise DataError(f"cannot be kept: {bad}") from None
    if len(record) > MAX_RECORD_BYTES:
        raise DataError(f"a prompt of {len(record)} bytes; at most {MAX_RECORD_BYTES}")
    return record


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
    if key not in fields:
        shown = ", ".join(repr(name[:64]) for name in list(fields)[:SHOWN_KEYS])
        raise DataError(f"no {key!r} (input_key); it has {shown or 'nothing'}")
    prompt = fields[key]
    if not isinstance(prompt, list):
        got = "empty text" if prompt == "" else _kind(prompt)
        raise DataError(f"{key!r} must be text or a list of chat messages, got {got}")
    if not prompt:
        raise DataError(f"{key!r} must be text or a list of chat messages, got an empty list")
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


def _check_unique(line: bytes) -> None:
    json.loads(line, object_pairs_hook=_unique)


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DataError(f"the key {twice!r} stands twice in one object; which one is meant?")
    return found

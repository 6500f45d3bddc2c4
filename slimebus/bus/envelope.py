"""Envelopes: one header frame (a msgpack map of at most 256 KiB), then bulk frames.

    +--------------------------------------------------------------+----------+----------+----
    | {v, type, id, run, sender, epoch, body}              msgpack | bulk 0   | bulk 1   | ...
    +--------------------------------------------------------------+----------+----------+----

`id` pairs a reply with its request; `epoch` fences an older process of the same name; bulk frames are raw little-endian
arrays or opaque bytes. Nothing here is ever unpickled or evaluated.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from slimebus.bus import protocol
from slimebus.bus.errors import Fenced, ProtocolError, SlimebusError
from slimebus.bus.messages import PROTOCOL_VERSION, TYPES, Error, Message, wire_name

MAX_HEADER_BYTES = 256 * 1024
MAX_FRAMES = 65536
MAX_ID = (1 << 63) - 1
MAX_NAME_BYTES = 128
"""Of a name or key that a client chooses, in UTF-8: it becomes a key of the broker's store, which takes 511 bytes."""
MAX_TEXT_CHARS = 4096
"""Of an error or a reason; beyond it is left out."""

Frame = bytes | bytearray | memoryview


class Header(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The first frame. `v`: protocol version; `type`: the body's message type; `run`: the run id (empty in a first hello)."""

    type: str
    id: int
    body: msgspec.Raw
    v: int
    run: str = ""
    sender: str = ""
    epoch: int = 0


class Envelope(msgspec.Struct, frozen=True):
    """A decoded message with its header and its bulk frames."""

    header: Header
    message: Message
    bulk: Sequence[Any] = ()


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)


def encode(message: Message, *, id: int, run: str = "", sender: str = "", epoch: int = 0, v: int = PROTOCOL_VERSION) -> bytes:
    """The header frame of `message`, in protocol version `v`.

    Raises ProtocolError when it would exceed the header bound, or has what msgpack cannot hold.
    """
    try:
        body = msgspec.Raw(_encoder.encode(message))
        frame = _encoder.encode(Header(v=v, type=wire_name(type(message)), id=id, run=run, sender=sender, epoch=epoch, body=body))
    except (TypeError, ValueError, OverflowError, RecursionError) as bad:
        raise ProtocolError(f"{wire_name(type(message))} cannot be sent: {bad}") from None
    if len(frame) > MAX_HEADER_BYTES:
        text = f"{wire_name(type(message))}: header of {len(frame)} bytes, at most {MAX_HEADER_BYTES}"
        raise ProtocolError(f"{text}; move large values into bulk frames or send fewer")
    return frame


def check_frames(frames: Sequence[Any]) -> None:
    """Raise ProtocolError for a message of no frames, or of too many."""
    if not 0 < len(frames) <= MAX_FRAMES:
        raise ProtocolError(f"a message of {len(frames)} frames; expected 1 to {MAX_FRAMES}")


def decode_header(frame: Any) -> Header:
    """The header of a first frame, its body still raw. Raises ProtocolError on anything else."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        return _header_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(f"header does not parse: {bad}".replace("`$.", "`header.")) from None


def check_version(header: Header) -> None:
    """Raise ProtocolError `protocol_version` for a message with a body that cannot be read here."""
    if header.v != PROTOCOL_VERSION and not protocol.is_spoken(header.v, header.type):
        raise protocol.unreadable(header.v)


def check_requester(header: Header) -> None:
    """Raise ProtocolError unless a request has an id and a sender that can be answered and kept."""
    if not 0 <= header.id <= MAX_ID:
        raise ProtocolError(f"{header.type[:64]}: id {header.id}; expected 0 to 2^63-1")
    check_name(f"{header.type[:64]}: sender", header.sender)


def check_name(what: str, name: str) -> None:
    """Raise ProtocolError for a name or key that is empty, too long to be kept, or has what no terminal or table should get."""
    size = len(name.encode())
    if not 0 < size <= MAX_NAME_BYTES:
        raise ProtocolError(f"{what} {name[:64]!r} has {size} bytes in UTF-8; expected 1 to {MAX_NAME_BYTES}")
    if not name.isprintable():
        raise ProtocolError(f"{what} {name[:64]!r} has characters that are not printable")


@cache
def _decoder_of(cls: type[Message]) -> msgspec.msgpack.Decoder[Message]:
    return msgspec.msgpack.Decoder(cls)


def decode_body(header: Header, types: Mapping[str, type[Message]] = TYPES) -> Message:
    """The typed message of a header. Raises ProtocolError (`unknown_type`) when this process does not know it."""
    cls = types.get(header.type)
    if cls is None:
        raise ProtocolError(f"unknown message type {header.type[:64]!r}", code="unknown_type")
    try:
        return _decoder_of(cls).decode(header.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(f"{header.type}: {bad}".replace("`$.", "`body.")) from None


def decode(frames: Sequence[Any], types: Mapping[str, type[Message]] = TYPES) -> Envelope:
    """An envelope from its frames (bytes-like; bulk frames are kept as they are)."""
    check_frames(frames)
    header = decode_header(frames[0])
    check_version(header)
    return Envelope(header, decode_body(header, types), frames[1:])


def one_line(text: str) -> str:
    """Text that a peer may have a part in, for a log, a terminal or a table: bounded, and what is not printable as its escape."""
    text = text[:MAX_TEXT_CHARS]
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def error_reply(problem: SlimebusError) -> Error:
    """The wire form of an error."""
    return Error(code=problem.code, text=one_line(problem.text), retryable=problem.retryable)


def problem_of(error: Error, peer: str) -> SlimebusError:
    """The error that a reply carries, with the peer's name in front."""
    kind = Fenced if error.code == Fenced.code else SlimebusError
    return kind(f"{peer}: {error.text}", code=error.code, retryable=error.retryable)

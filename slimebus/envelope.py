"""Envelopes: one header frame (a msgpack map of at most 64 KiB), then bulk frames.

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

from slimebus import protocol
from slimebus.errors import Fenced, ProtocolError, SlimebusError
from slimebus.messages import PROTOCOL_VERSION, TYPES, Error, Message, wire_name

MAX_HEADER_BYTES = 64 * 1024
MAX_FRAMES = 65536

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
    """The header frame of `message`, in protocol version `v`. Raises ProtocolError when it would exceed the header bound."""
    body = msgspec.Raw(_encoder.encode(message))
    frame = _encoder.encode(Header(v=v, type=wire_name(type(message)), id=id, run=run, sender=sender, epoch=epoch, body=body))
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"{wire_name(type(message))}: header of {len(frame)} bytes, at most {MAX_HEADER_BYTES}; "
            "move large values into bulk frames or send fewer"
        )
    return frame


def decode_header(frame: Any) -> Header:
    """The header of a first frame, its body still raw. Raises ProtocolError on anything else."""
    if len(frame) > MAX_HEADER_BYTES:
        raise ProtocolError(f"header of {len(frame)} bytes, at most {MAX_HEADER_BYTES}")
    try:
        header = _header_decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as bad:
        raise ProtocolError(f"header does not parse: {bad}") from None
    if header.v != PROTOCOL_VERSION and not protocol.is_spoken(header.v, header.type):
        raise protocol.unreadable(header.v)
    return header


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
        raise ProtocolError(f"{header.type}: {bad}") from None


def decode(frames: Sequence[Any], types: Mapping[str, type[Message]] = TYPES) -> Envelope:
    """An envelope from its frames (bytes-like; bulk frames are kept as they are)."""
    if not frames:
        raise ProtocolError("a message without frames")
    if len(frames) > MAX_FRAMES:
        raise ProtocolError(f"{len(frames)} frames, at most {MAX_FRAMES}")
    header = decode_header(frames[0])
    return Envelope(header, decode_body(header, types), frames[1:])


def error_reply(problem: SlimebusError) -> Error:
    """The wire form of an error."""
    return Error(code=problem.code, text=problem.text, retryable=problem.retryable)


def raise_for_error(message: Message, peer: str) -> Message:
    """The message itself, or the error it carries, raised with the peer's name in front."""
    if isinstance(message, Error):
        kind = Fenced if message.code == Fenced.code else SlimebusError
        raise kind(f"{peer}: {message.text}", code=message.code, retryable=message.retryable)
    return message

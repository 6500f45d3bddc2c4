"""The store: a few tables of opaque records, changed by one atomic commit at a time.

A record of several frames is kept as one value:

    +-----------+-------------+-----+--------------+---------+-----+-----------+
    | count u32 | size_0 u64  | ... | size_n-1 u64 | frame 0 | ... | frame n-1 |
    +-----------+-------------+-----+--------------+---------+-----+-----------+
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

FORMAT = 1
"""The layout of the store. Another number is refused with the way out."""

TABLES = ("meta", "groups", "ended", "prompts", "payloads", "partials", "clients", "steps", "evaluations")


class Write(msgspec.Struct, frozen=True, gc=False):
    """One change: a value (bytes, or frames to keep together), or None to remove the record."""

    table: str
    key: str
    value: bytes | Sequence[Any] | None


class Store(Protocol):
    """A place to keep records. Raises SlimebusError `store` when it cannot."""

    def commit(self, writes: Sequence[Write]) -> None:
        """Make every change or none; once it returns they survive what the store's durability promises."""

    def get(self, table: str, key: str) -> bytes | None:
        """One record, or None."""

    def frames(self, table: str, key: str) -> Sequence[Any] | None:
        """The frames of a record that was written as frames, or None."""

    def scan(self, table: str) -> Iterator[tuple[str, bytes]]:
        """Every record of a table, by key."""

    def size_bytes(self) -> int:
        """What the records take up."""

    def close(self) -> None:
        """Release it."""


def pack_frames(frames: Sequence[Any]) -> bytes:
    """One value from several frames."""
    sizes = [len(frame) for frame in frames]
    return b"".join((struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes), *frames))


def unpack_frames(value: bytes) -> list[memoryview]:
    """The frames of a value, as views of it."""
    view = memoryview(value)
    (count,) = struct.unpack_from("<I", view)
    sizes = struct.unpack_from(f"<{count}Q", view, 4)
    start, frames = 4 + 8 * count, []
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return frames


def packed(value: bytes | Sequence[Any]) -> bytes:
    """The bytes to keep of a write's value."""
    return value if isinstance(value, bytes) else pack_frames(value)


def packed_size(value: bytes | Sequence[Any]) -> int:
    """The length of `packed(value)`."""
    if isinstance(value, bytes):
        return len(value)
    return 4 + 8 * len(value) + sum(map(len, value))


def pack_into(buffer: memoryview, frames: Sequence[Any]) -> memoryview:
    """Write what pack_frames gives to the start of `buffer`, and give that part of it."""
    sizes = [len(frame) for frame in frames]
    struct.pack_into(f"<I{len(sizes)}Q", buffer, 0, len(sizes), *sizes)
    end = 4 + 8 * len(sizes)
    for frame, size in zip(frames, sizes, strict=True):
        buffer[end : end + size] = frame
        end += size
    return buffer[:end]

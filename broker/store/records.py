"""The form of a stored record. Every record carries a checksum, so that damage is found and never used.

    +----------------+------+
    | xxh3_64 u64 le | body |        the checksum is over the body, seeded by table and key: a record in a wrong place is damage too
    +----------------+------+

The body of a record of several frames:

    +-----------+-------------+-----+--------------+---------+-----+-----------+
    | count u32 | size_0 u64  | ... | size_n-1 u64 | frame 0 | ... | frame n-1 |
    +-----------+-------------+-----+--------------+---------+-----+-----------+
"""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import xxhash

from broker.store.interface import Damaged

CHECKSUM_BYTES = 8


def pack_frames(frames: Sequence[Any]) -> bytes:
    """One value from several frames."""
    sizes = [len(frame) for frame in frames]
    return b"".join((struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes), *frames))


def packed_size(value: bytes | Sequence[Any]) -> int:
    """The length of `packed(value)`."""
    if isinstance(value, bytes):
        return len(value)
    return 4 + 8 * len(value) + sum(map(len, value))


def pack_into(buffer: memoryview, frames: Sequence[Any]) -> int:
    """Write what pack_frames gives to the start of `buffer`; its length."""
    sizes = [len(frame) for frame in frames]
    struct.pack_into(f"<I{len(sizes)}Q", buffer, 0, len(sizes), *sizes)
    end = 4 + 8 * len(sizes)
    for frame, size in zip(frames, sizes, strict=True):
        buffer[end : end + size] = frame
        end += size
    return end


def unpack_frames(value: bytes, table: str = "", key: str = "") -> list[memoryview]:
    """The frames of a value, as views of it. Raises Damaged, of this table and key, where the sizes do not add up to the value."""
    view = memoryview(value)
    count = int.from_bytes(view[:4], "little")
    start, frames = 4 + 8 * count, list[memoryview]()
    sizes = struct.unpack_from(f"<{count}Q", view, 4) if start <= len(view) else ()
    if len(view) < 4 or start + sum(sizes) != len(view):
        raise Damaged(table, key, f"the stored record {key!r} of table {table!r} is damaged: its frames are not of the sizes it names")
    for size in sizes:
        frames.append(view[start : start + size])
        start += size
    return frames


def packed(value: bytes | Sequence[Any]) -> bytes:
    """The body of a write's value."""
    return value if isinstance(value, bytes) else pack_frames(value)


def seal(table: str, key: str, body: bytes) -> bytes:
    """The bytes to store: the checksum, then the body."""
    return struct.pack("<Q", xxhash.xxh3_64_intdigest(body, seed_of(table, key))) + body


def seal_frames(table: str, key: str, frames: Sequence[Any], buffer: memoryview) -> memoryview:
    """The bytes to store of several frames, made in `buffer`: the part of it that they take."""
    end = CHECKSUM_BYTES + pack_into(buffer[CHECKSUM_BYTES:], frames)
    struct.pack_into("<Q", buffer, 0, xxhash.xxh3_64_intdigest(buffer[CHECKSUM_BYTES:end], seed_of(table, key)))
    return buffer[:end]


def unseal(table: str, key: str, stored: Any) -> bytes:
    """The body of stored bytes. Raises Damaged when they are not those that were sealed for this table and key."""
    body = bytes(stored[CHECKSUM_BYTES:])
    if len(stored) < CHECKSUM_BYTES or xxhash.xxh3_64_intdigest(body, seed_of(table, key)) != struct.unpack_from("<Q", stored)[0]:
        raise Damaged(table, key, f"the stored record {key!r} of table {table!r} is damaged: its checksum does not fit")
    return body


def seed_of(table: str, key: str) -> int:
    """Ties a checksum to its place."""
    return zlib.crc32(key.encode(), zlib.crc32(table.encode()))

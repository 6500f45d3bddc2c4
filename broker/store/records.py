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
    return b"".join((_sizes(frames), *frames))


def _sizes(frames: Sequence[Any]) -> bytes:
    sizes = [len(frame) for frame in frames]
    return struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)


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
    """The body of a write's value."""
    return value if isinstance(value, bytes) else pack_frames(value)


def seal(table: str, key: str, value: bytes | Sequence[Any]) -> bytes:
    """The bytes to store: the checksum, then the body."""
    seed = seed_of(table, key)
    if isinstance(value, bytes):
        return struct.pack("<Q", xxhash.xxh3_64_intdigest(value, seed)) + value
    parts = (_sizes(value), *value)
    digest = xxhash.xxh3_64(seed=seed)
    for part in parts:
        digest.update(part)
    return b"".join((struct.pack("<Q", digest.intdigest()), *parts))


def unseal(table: str, key: str, stored: Any) -> bytes:
    """The body of stored bytes. Raises Damaged when they are not those that were sealed for this table and key."""
    body = bytes(stored[CHECKSUM_BYTES:])
    if len(stored) < CHECKSUM_BYTES or xxhash.xxh3_64_intdigest(body, seed_of(table, key)) != struct.unpack_from("<Q", stored)[0]:
        raise Damaged(table, key, f"the stored record {key!r} of table {table!r} is damaged: its checksum does not fit")
    return body


def seed_of(table: str, key: str) -> int:
    """Ties a checksum to its place."""
    return zlib.crc32(key.encode(), zlib.crc32(table.encode()))

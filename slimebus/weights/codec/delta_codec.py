"""Deltas of 16-bit tensors (bfloat16, float16) as exact integer steps between bit patterns.

A payload is one unit for every 2**22 values, in order, the last one shorter. A unit is a header and three streams:

    0      1        2                                                       H
    +------+--------+------------+---------------+--------------------------+----------+----------+----------+----------+
    | kind | format | raw_size 0 | stored_size 0 | and of streams 1, 2, 3   | stream 0 | stream 1 | stream 2 | stream 3 |
    | u8   | u8     | varint     | varint        | 6 varints                |          |          |          |          |
    +------+--------+------------+---------------+--------------------------+----------+----------+----------+----------+

    kind        stream 0          stream 1                      stream 2    stream 3
    1 full      new values, u16   (empty)                       (empty)     (empty)
    2 sparse    gaps, u8          a nibble per changed value    wides, u8   escapes, u16
    3 dense     (empty)           a nibble per value            wides, u8   escapes, u16
    4 rare      gaps, Rice code   a nibble per changed value    wides, u8   escapes, u16

A stream with a stored size equal to its raw size is raw; a smaller one is one zstd frame. docs/weights.md says every byte.
Steps are differences modulo 2**16 of bit patterns, so deltas add up: `merge` needs no copy of any version.
"""

import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import zstandard

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.codec.kernel import Bytes, Changes, Kernel, Values, decode_rice, encode_rice, load_kernel, read_gaps, write_gaps
from slimebus.weights.threads import Stages, Threads

FORMAT = 2
UNIT_VALUES = 1 << 22
FULL, SPARSE, DENSE, RARE = 1, 2, 3, 4
MAX_HEADER_BYTES = 2 + 8 * 4

TRY_DENSE_ABOVE = 1 / 3
"""From this fraction of changed values on, dense is tried too and the smaller one kept. Raw they meet here; with zstd at 36 to 43%."""

MIN_ZSTD_BYTES = 128
"""Below this a zstd frame's own header outweighs what it saves."""

RARE_BELOW = 1 / 512
"""With fewer values changed than this, most bytes of gaps would be 255, on which zstd spends a bit each: a Rice code is smaller."""


class Encoded(NamedTuple):
    """A payload and how many values it changes. A payload that changes nothing is still a valid payload."""

    payload: bytes
    num_changed: int


class Unit(NamedTuple):
    """One unit of a payload with checked sizes; its streams are still as stored, raw or zstd."""

    kind: int
    start: int
    num_values: int
    raw_sizes: Sequence[int]
    stored: Sequence[memoryview]


def codec_path() -> str:
    """Which kernel this process uses: `c (avx2)`, `c (portable)`, ..., or `numpy` where none was compiled."""
    return load_kernel().name


def encode(
    base: Values,
    target: Values,
    *,
    update: bool = False,
    zstd: bool = True,
    kernel: Kernel | None = None,
    threads: Threads | None = None,
    stages: Stages | None = None,
) -> Encoded:
    """The delta that leads from base to target, flat u16 arrays of one length; with update, base becomes target.

    Never larger than the values themselves but for one header a unit. threads: encode units at once.
    stages: where the seconds of `diff` (finding what changed) and `encode` (writing it small) are added.
    Raises WeightsError when the lengths differ, and with update when base cannot be written to in place.
    """
    if base.shape != target.shape or base.ndim != 1:
        raise FatalWeightsError(f"delta between arrays of shapes {base.shape} and {target.shape}; expected one length")
    chosen, timed = kernel or load_kernel(), stages or Stages()
    base, target = _plain(base, is_written=update), _plain(target)

    def encode_from(start: int) -> Encoded:
        old, new = base[start : start + UNIT_VALUES], target[start : start + UNIT_VALUES]
        with timed("diff"):
            changes = chosen.scan(old, new, update)
        with timed("encode"):
            payload = _smallest(changes, len(new), zstd, chosen)
            if len(payload) > 2 * len(new):
                payload = min(payload, _full(new), key=len)
        return Encoded(payload, len(changes.codes))

    return _join((threads or Threads()).map(encode_from, range(0, len(base), UNIT_VALUES)))


def apply(
    payload: Any,
    values: Values,
    *,
    base: Values | None = None,
    on_unit: Callable[[Values], object] | None = None,
    kernel: Kernel | None = None,
    threads: Threads | None = None,
) -> None:
    """Make the target in values, u16, of the length that was encoded: out of `base`, or in place out of what they are.

    on_unit: called with each unit of the values when it is done, in order, while it is still in the cache.
    Raises WeightsError on any payload that `encode` or `merge` could not have made for that length; values may then be
    partly new and must be thrown away. Nothing is allocated beyond the raw streams of a unit, at most 5 bytes a value.
    """
    chosen, values = kernel or load_kernel(), _plain(values, is_written=True)

    def make(unit: Unit) -> Values:
        part = slice(unit.start, unit.start + unit.num_values)
        if base is not None and unit.kind != FULL:
            np.copyto(values[part], base[part])
        _apply_unit(unit, values[part], chosen)
        return values[part]

    for made in (threads or Threads()).map(make, split_units(payload, len(values))):
        if on_unit is not None:
            on_unit(made)


def undo(payloads: Sequence[Any], values: Values, *, kernel: Kernel | None = None) -> bool:
    """Take back the steps of these deltas, which led to `values` (u16, changed in place); False, with nothing changed, where a unit holds
    new values instead of steps. Raises WeightsError on a bad payload.
    """
    if any(unit.kind == FULL for payload in payloads for unit in split_units(payload, len(values))):
        return False
    total = np.zeros(len(values), np.uint16)
    for payload in payloads:
        apply(payload, total, kernel=kernel)
    np.subtract(values, total, out=values)
    return True


def merge(payloads: Sequence[Any], num_values: int, *, zstd: bool = True, kernel: Kernel | None = None) -> Encoded:
    """One delta that does what these do in turn: from the base of the first to the target of the last.

    Exact without a copy of any version, because steps add up modulo 2**16. It may exceed the size of the values (at most
    2.5 times, on noise), since those are not at hand. Raises WeightsError on a bad payload.
    """
    if not payloads:
        raise FatalWeightsError("merge of no payloads; expected at least one")
    chosen = kernel or load_kernel()
    chain = [split_units(payload, num_values) for payload in payloads]
    return _join(_merge_units(units, zstd, chosen) for units in zip(*chain, strict=True))


def _plain(values: Values, *, is_written: bool = False) -> Values:
    """The array as the kernels take it, who trust its type and its memory: a copy of one that is not aligned, native and without gaps."""
    if values.ndim != 1 or values.dtype.newbyteorder("=") != np.uint16:
        raise FatalWeightsError(f"{values.dtype} values of shape {values.shape}; expected a flat array of uint16")
    is_plain = values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative
    if is_written and not (is_plain and values.flags.writeable):
        raise FatalWeightsError("values that are to be written to are read-only, or not aligned, native and without gaps")
    return values if is_plain else np.array(values, np.uint16)


def split_units(payload: Any, num_values: int) -> list[Unit]:
    """The units of a payload for a tensor of num_values. Raises WeightsError where a size does not fit."""
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    units, end = [], 0
    for start in range(0, num_values, UNIT_VALUES):
        size, begin = min(UNIT_VALUES, num_values - start), end
        kind, sizes, at = read_header(view, begin)
        raw_sizes, stored_sizes = sizes[0::2], sizes[1::2]
        _check_sizes(kind, size, raw_sizes, stored_sizes)
        *starts, end = itertools.accumulate(stored_sizes, initial=at)
        if end > len(view):
            raise WeightsError(f"delta payload of {len(view)} bytes, its unit at byte {begin} says it ends at {end}")
        stored = [view[place : place + length] for place, length in zip(starts, stored_sizes, strict=True)]
        units.append(Unit(kind, start, size, raw_sizes, stored))
    if end != len(view):
        raise WeightsError(f"delta payload: {len(view) - end} bytes after its last unit")
    return units


def write_header(kind: int, sizes: Sequence[int]) -> bytes:
    """The header of a unit. sizes: raw and stored of each stream in turn, below 2**28; 7 bits a byte, the lowest first, 128 for more."""
    header = bytearray((kind, FORMAT))
    for size in sizes:
        while size > 127:
            header.append(size & 127 | 128)
            size >>= 7
        header.append(size)
    return bytes(header)


def read_header(view: memoryview, offset: int) -> tuple[int, list[int], int]:
    """Kind, sizes and end of the header at offset. Raises WeightsError for one that `write_header` could not have made."""
    header = bytes(view[offset : offset + MAX_HEADER_BYTES])
    if len(header) > 1 and header[1] != FORMAT:
        raise WeightsError(f"delta unit of format {header[1]}; this process reads format {FORMAT}")
    ends = [i + 1 for i in range(2, len(header)) if header[i] < 128][:8]
    if len(ends) < 8:
        raise WeightsError(f"delta of {len(view)} bytes ends within the header of the unit at byte {offset}, or a size is too large")
    places = itertools.pairwise([2, *ends])
    sizes = [sum((header[i] & 127) << 7 * (i - start) for i in range(start, end)) for start, end in places]
    if write_header(header[0], sizes) != header[: ends[-1]]:
        raise WeightsError(f"delta unit at byte {offset}: a stream size that takes more bytes than it needs")
    return header[0], sizes, offset + ends[-1]


def _check_sizes(kind: int, num_values: int, raw: list[int], stored: list[int]) -> None:
    """Bound every size by the number of values, before any is used."""
    first = {FULL: 2 * num_values, SPARSE: num_values + num_values // 255, DENSE: 0, RARE: 16 + num_values // 128}.get(kind)
    if first is None:
        raise WeightsError(f"delta unit of unknown kind {kind}")
    limits = [first, 0, 0, 0] if kind == FULL else [first, (num_values + 1) // 2, num_values, 2 * num_values]
    is_exact = kind in (SPARSE, RARE) or raw[:2] == limits[:2]
    if not is_exact or any(map(operator.gt, raw, limits)) or any(map(operator.gt, stored, raw)):
        raise WeightsError(f"delta unit of kind {kind} for {num_values} values has impossible stream sizes {raw}, stored {stored}")


def _smallest(changes: Changes, num_values: int, zstd: bool, kernel: Kernel) -> bytes:
    """The smaller of the two delta forms of a unit."""
    num_changed = len(changes.codes)
    tails = [_store(stream, zstd) for stream in (changes.wides, changes.escapes)]
    codes = _store(kernel.pack(changes.codes), zstd)
    if 0 < num_changed < num_values * RARE_BELOW:
        return _unit(RARE, [_store(encode_rice(read_gaps(changes.gaps)), False), codes, *tails])
    sparse = _unit(SPARSE, [_store(changes.gaps, zstd), codes, *tails])
    if num_changed <= num_values * TRY_DENSE_ABOVE:
        return sparse
    dense = _unit(DENSE, [_EMPTY, _store(kernel.densify(num_values, changes), zstd), *tails])
    return min(sparse, dense, key=len)


def _full(values: Values) -> bytes:
    return _unit(FULL, [_store(values.view(np.uint8), False), _EMPTY, _EMPTY, _EMPTY])


_Stored = tuple[int, bytes]
"""A stream: its raw size, and its bytes raw or as a zstd frame."""
_EMPTY = (0, b"")


def _store(stream: Bytes, zstd: bool) -> _Stored:
    if zstd and len(stream) >= MIN_ZSTD_BYTES:
        compressed = _zstd.compressor.compress(stream.data)
        if len(compressed) < len(stream):
            return len(stream), compressed
    return len(stream), stream.tobytes()


def _unit(kind: int, streams: Sequence[_Stored]) -> bytes:
    sizes = [size for raw_size, stored in streams for size in (raw_size, len(stored))]
    return b"".join((write_header(kind, sizes), *(stored for _, stored in streams)))


class _Zstd(threading.local):
    """zstd contexts, which must not be shared between threads.

    The compressor looks for hardly any matches (a tiny table, long ones only) and entropy-codes the rest: on these streams
    that is up to 10% smaller and 1.1 to 1.5 times as fast as level 1.
    """

    def __init__(self) -> None:
        parameters = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17, search_log=1, target_length=0
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


def _load(stored: memoryview, raw_size: int) -> bytes:
    """The raw bytes of a stream. The frame's own idea of its size is checked before anything is allocated for it."""
    if len(stored) == raw_size:
        return bytes(stored)
    try:
        claimed = zstandard.frame_content_size(stored)
        if claimed != raw_size:
            raise WeightsError(f"delta stream: its zstd frame holds {claimed} bytes, the unit says {raw_size}")
        return _zstd.decompressor.decompress(stored, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as bad:
        raise WeightsError(f"delta stream of {len(stored)} bytes does not decompress: {bad}") from None


def _apply_unit(unit: Unit, values: Values, kernel: Kernel) -> None:
    first, nibbles, wides, escapes = (_load(stored, size) for stored, size in zip(unit.stored, unit.raw_sizes, strict=True))
    if unit.kind == FULL:
        values.view(np.uint8)[:] = np.frombuffer(first, np.uint8)
        return
    gaps: bytes | None = first
    if unit.kind == RARE:
        distances = decode_rice(np.frombuffer(first, np.uint8))
        is_within = distances is not None and int(distances.sum()) + len(distances) <= unit.num_values
        gaps = write_gaps(distances).tobytes() if distances is not None and is_within else None
    if unit.kind == DENSE:
        fits = kernel.apply_dense(values, nibbles, wides, escapes)
    else:
        fits = gaps is not None and kernel.apply_sparse(values, gaps, nibbles, wides, escapes)
    if not fits:
        raise WeightsError(f"delta unit at value {unit.start}: its streams do not fit each other or its {unit.num_values} values")


def _merge_units(units: Sequence[Unit], zstd: bool, kernel: Kernel) -> Encoded:
    """Add the steps up on zeros; a full unit is absolute, so what came before it does not matter."""
    last_full = max((i for i, unit in enumerate(units) if unit.kind == FULL), default=0)
    total = np.zeros(units[0].num_values, np.uint16)
    for unit in units[last_full:]:
        _apply_unit(unit, total, kernel)
    if units[last_full].kind == FULL:
        return Encoded(_full(total), len(total))
    changes = kernel.scan(np.zeros(len(total), np.uint16), total, False)
    return Encoded(_smallest(changes, len(total), zstd, kernel), len(changes.codes))


def _join(units: Iterable[Encoded]) -> Encoded:
    """One payload from those of its units."""
    parts = list(units)
    if len(parts) == 1:
        return parts[0]
    return Encoded(b"".join(part.payload for part in parts), sum(part.num_changed for part in parts))

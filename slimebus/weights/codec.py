"""Deltas of 16-bit tensors (bfloat16, float16) as exact integer steps between bit patterns.

A payload is one unit for every 2**22 values, in order, the last one shorter. A unit is a header and three streams:

    0      1        2     4            8            12              16 ... 39      40
    +------+--------+-----+------------+------------+---------------+--------------+----------+----------+----------+----------+
    | kind | format | 0   | num_values | raw_size 0 | stored_size 0 | and of 1,2,3 | stream 0 | stream 1 | stream 2 | stream 3 |
    | u8   | u8     | u16 | u32        | u32        | u32           | 6 x u32      |          |          |          |          |
    +------+--------+-----+------------+------------+---------------+--------------+----------+----------+----------+----------+

    kind        stream 0          stream 1                      stream 2    stream 3
    1 full      new values, u16   (empty)                       (empty)     (empty)
    2 sparse    gaps, u8          a nibble per changed value    wides, u8   escapes, u16
    3 dense     (empty)           a nibble per value            wides, u8   escapes, u16

A stream whose stored size equals its raw size is raw; a smaller one is one zstd frame. docs/weights.md says every byte.
Steps are differences modulo 2**16 of bit patterns, so deltas add up: `merge` needs no copy of any version.
"""

import itertools
import operator
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import zstandard

from slimebus.errors import WeightsError
from slimebus.weights.kernel import Bytes, Changes, Kernel, Values, load_kernel
from slimebus.weights.stages import Stages

FORMAT = 1
UNIT_VALUES = 1 << 22
FULL, SPARSE, DENSE = 1, 2, 3
HEADER = struct.Struct("<BBHIIIIIIIII")

TRY_DENSE_ABOVE = 1 / 3
"""From this fraction of changed values on, dense is tried too and the smaller one kept. Raw they meet here; with zstd at 36 to 43%."""

MIN_ZSTD_BYTES = 128
"""Below this a zstd frame's own header outweighs what it saves."""

ZSTD_GAPS_ABOVE = 1 / 64
"""With fewer values changed than this, gaps have 7.4 bits of entropy or more: zstd would take time and save nothing."""


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
    end: int


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
    pool: Executor | None = None,
    stages: Stages | None = None,
) -> Encoded:
    """The delta that leads from base to target, flat u16 arrays of one length; with update, base becomes target.

    Never larger than the values themselves but for one header a unit. pool: encode units at once.
    stages: where the seconds of `diff` (finding what changed) and `encode` (writing it small) are added.
    Raises WeightsError when the lengths differ, and with update when base is read-only.
    """
    if base.shape != target.shape or base.ndim != 1:
        raise WeightsError(f"delta between arrays of shapes {base.shape} and {target.shape}; expected one length", retryable=False)
    chosen, timed = kernel or load_kernel(), stages or Stages()
    given, base, target = base, _plain(base, is_written=update), _plain(target)

    def encode_from(start: int) -> Encoded:
        old, new = base[start : start + UNIT_VALUES], target[start : start + UNIT_VALUES]
        with timed("diff"):
            changes = chosen.scan(old, new, update)
        with timed("encode"):
            return encode_unit(changes, len(new), lambda: new, zstd, chosen)

    encoded = join(_each(pool, encode_from, range(0, len(base), UNIT_VALUES)))
    if update and base is not given:
        given[:] = base
    return encoded


def encode_changes(base: Values, units: Sequence[Changes], *, zstd: bool = True, kernel: Kernel | None = None) -> Encoded:
    """As `encode` with update, from what a scan of each unit found elsewhere, such as on a GPU: base becomes the target.

    Raises WeightsError when the changes are not of units of that many values; base is then to be thrown away.
    """
    chosen = kernel or load_kernel()
    starts = range(0, len(base), UNIT_VALUES)
    if len(units) != len(starts):
        raise WeightsError(f"changes of {len(units)} units for {len(base)} values, which are {len(starts)} units", retryable=False)

    def move(start: int, changes: Changes) -> Encoded:
        values = base[start : start + UNIT_VALUES]
        if not chosen.apply_sparse(values, changes.gaps, chosen.pack(changes.codes), changes.wides, changes.escapes):
            raise misfit(start, len(values))
        return encode_unit(changes, len(values), lambda: values, zstd, chosen)

    return join([move(start, changes) for start, changes in zip(starts, units, strict=True)])


def apply(payload: Any, values: Values, *, kernel: Kernel | None = None, pool: Executor | None = None) -> None:
    """Turn the base into the target in place. values: u16, contiguous, of the length that was encoded.

    Raises WeightsError on any payload that `encode` or `merge` could not have made for that length; values may then be
    partly new and must be thrown away. Nothing is allocated beyond the raw streams of a unit, at most 5 bytes a value.
    """
    chosen, inside = kernel or load_kernel(), _plain(values, is_written=True)
    units = split_units(payload, len(values))
    _each(pool, lambda unit: _apply_unit(unit, inside[unit.start : unit.start + unit.num_values], chosen), units)
    if inside is not values:
        values[:] = inside


def apply_to_copy(
    payload: Any, base: Values, values: Values, *, kernel: Kernel | None = None, pool: Executor | None = None
) -> Iterator[Values]:
    """As `apply` to a copy of base in values, a unit after the other; each comes out when it is done, still in the cache for who hashes it.

    Nothing is done that is not taken, but with a pool. Raises as `apply`, then or later.
    """
    chosen = kernel or load_kernel()
    if _plain(values, is_written=True) is not values:
        raise WeightsError("a delta is applied to memory that is not aligned or not contiguous", retryable=False)

    def make(unit: Unit) -> Values:
        part = slice(unit.start, unit.start + unit.num_values)
        if unit.kind != FULL:
            np.copyto(values[part], base[part])
        _apply_unit(unit, values[part], chosen)
        return values[part]

    units = split_units(payload, len(values))
    return map(make, units) if pool is None or len(units) < 2 else pool.map(make, units)


def merge(payloads: Sequence[Any], num_values: int, *, zstd: bool = True, kernel: Kernel | None = None) -> Encoded:
    """One delta that does what these do in turn: from the base of the first to the target of the last.

    Exact without a copy of any version, because steps add up modulo 2**16. It may exceed the size of the values (at most
    2.5 times, on noise), since those are not at hand. Raises WeightsError on a bad payload.
    """
    if not payloads:
        raise WeightsError("merge of no payloads; expected at least one", retryable=False)
    chosen = kernel or load_kernel()
    chain = [split_units(payload, num_values) for payload in payloads]
    return join([_merge_units(units, zstd, chosen) for units in zip(*chain, strict=True)])


def _plain(values: Values, *, is_written: bool = False) -> Values:
    """The array as the kernels take it, who trust its type and its memory: a copy of one that is not aligned, native and without gaps."""
    if values.ndim != 1 or values.dtype.newbyteorder("=") != np.uint16:
        raise WeightsError(f"{values.dtype} values of shape {values.shape}; expected a flat array of uint16", retryable=False)
    if is_written and not values.flags.writeable:
        raise WeightsError("values that are to be written to are read-only", retryable=False)
    is_plain = values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative
    return values if is_plain else np.array(values, np.uint16)


def split_units(payload: Any, num_values: int) -> list[Unit]:
    """The units of a payload for a tensor of num_values. Raises WeightsError where a size does not fit."""
    view = memoryview(payload).cast("B") if len(payload) else memoryview(b"")
    units, offset = [], 0
    for start in range(0, num_values, UNIT_VALUES):
        unit = _read_unit(view, offset, start, min(UNIT_VALUES, num_values - start))
        offset = unit.end
        units.append(unit)
    if offset != len(view):
        raise WeightsError(f"delta payload: {len(view) - offset} bytes after its last unit")
    return units


def _read_unit(view: memoryview, offset: int, start: int, num_values: int) -> Unit:
    if len(view) - offset < HEADER.size:
        raise WeightsError(f"delta payload ends at byte {len(view)}, within the header of the unit at byte {offset}")
    kind, version, zero, count, *sizes = HEADER.unpack_from(view, offset)
    if version != FORMAT or zero != 0:
        raise WeightsError(f"delta unit of format {version}; this process reads format {FORMAT}")
    if count != num_values:
        raise WeightsError(f"delta unit for {count} values, expected {num_values}")
    raw_sizes, stored_sizes = sizes[0::2], sizes[1::2]
    _check_sizes(kind, num_values, raw_sizes, stored_sizes)
    *starts, end = itertools.accumulate(stored_sizes, initial=offset + HEADER.size)
    if end > len(view):
        raise WeightsError(f"delta payload of {len(view)} bytes, its unit at byte {offset} says it ends at {end}")
    return Unit(kind, start, num_values, raw_sizes, [view[at : at + size] for at, size in zip(starts, stored_sizes, strict=True)], end)


def _check_sizes(kind: int, num_values: int, raw: list[int], stored: list[int]) -> None:
    """Bound every size by the number of values, before any is used."""
    first = {FULL: 2 * num_values, SPARSE: num_values + num_values // 255, DENSE: 0}.get(kind)
    if first is None:
        raise WeightsError(f"delta unit of unknown kind {kind}")
    limits = [first, 0, 0, 0] if kind == FULL else [first, (num_values + 1) // 2, num_values, 2 * num_values]
    is_exact = kind == SPARSE or raw[:2] == limits[:2]
    if not is_exact or any(map(operator.gt, raw, limits)) or any(map(operator.gt, stored, raw)):
        raise WeightsError(f"delta unit of kind {kind} for {num_values} values has impossible stream sizes {raw}, stored {stored}")


def encode_unit(changes: Changes, num_values: int, read_new: Callable[[], Values], zstd: bool, kernel: Kernel) -> Encoded:
    """One unit from its changes: the smallest of its forms. read_new: its new values, asked for only where they are the smallest."""
    payload = _smallest(changes, num_values, zstd, kernel)
    if len(payload) > HEADER.size + 2 * num_values:
        payload = _full(read_new())
    return Encoded(payload, len(changes.codes))


def _smallest(changes: Changes, num_values: int, zstd: bool, kernel: Kernel) -> bytes:
    """The smaller of the two delta forms of a unit."""
    num_changed = len(changes.codes)
    tails = [_store(stream, zstd) for stream in (changes.wides, changes.escapes)]
    gaps = _store(changes.gaps, zstd and num_changed > num_values * ZSTD_GAPS_ABOVE)
    sparse = _unit(SPARSE, num_values, [gaps, _store(kernel.pack(changes.codes), zstd), *tails])
    if num_changed <= num_values * TRY_DENSE_ABOVE:
        return sparse
    dense = _unit(DENSE, num_values, [_EMPTY, _store(kernel.densify(num_values, changes), zstd), *tails])
    return min(sparse, dense, key=len)


def _full(values: Values) -> bytes:
    return _unit(FULL, len(values), [_store(values.view(np.uint8), False), _EMPTY, _EMPTY, _EMPTY])


class _Stored(NamedTuple):
    raw_size: int
    stored: bytes


_EMPTY = _Stored(0, b"")


def _store(stream: Bytes, zstd: bool) -> _Stored:
    if zstd and len(stream) >= MIN_ZSTD_BYTES:
        compressed = _zstd.compressor.compress(stream.data)
        if len(compressed) < len(stream):
            return _Stored(len(stream), compressed)
    return _Stored(len(stream), stream.tobytes())


def _unit(kind: int, num_values: int, streams: Sequence[_Stored]) -> bytes:
    sizes = [size for stream in streams for size in (stream.raw_size, len(stream.stored))]
    return b"".join((HEADER.pack(kind, FORMAT, 0, num_values, *sizes), *(stream.stored for stream in streams)))


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
        raw = _zstd.decompressor.decompress(stored, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as bad:
        raise WeightsError(f"delta stream of {len(stored)} bytes does not decompress: {bad}") from None
    if len(raw) != raw_size:
        raise WeightsError(f"delta stream: {len(raw)} bytes decompressed, the unit says {raw_size}")
    return raw


def load_streams(unit: Unit) -> list[bytes]:
    """The four raw streams of a unit. Raises WeightsError where one does not decompress to its size."""
    return [_load(stored, size) for stored, size in zip(unit.stored, unit.raw_sizes, strict=True)]


def _apply_unit(unit: Unit, values: Values, kernel: Kernel) -> None:
    first, nibbles, wides, escapes = load_streams(unit)
    if unit.kind == FULL:
        values.view(np.uint8)[:] = np.frombuffer(first, np.uint8)
        return
    if unit.kind == SPARSE:
        fits = kernel.apply_sparse(values, first, nibbles, wides, escapes)
    else:
        fits = kernel.apply_dense(values, nibbles, wides, escapes)
    if not fits:
        raise misfit(unit.start, unit.num_values)


def misfit(start: int, num_values: int) -> WeightsError:
    """For a unit whose streams are of the right sizes and yet not those of `encode`."""
    return WeightsError(f"delta unit at value {start}: its streams do not fit each other or its {num_values} values")


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


T = TypeVar("T")
R = TypeVar("R")


def _each(pool: Executor | None, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    if pool is None or len(items) < 2:
        return [work(item) for item in items]
    return list(pool.map(work, items))


def join(parts: Sequence[Encoded]) -> Encoded:
    """One payload from those of its units."""
    if len(parts) == 1:
        return parts[0]
    return Encoded(b"".join(part.payload for part in parts), sum(part.num_changed for part in parts))

"""Boxes of a tensor: where a rank's part lies in the whole, for any layout that saved it and any that loads it.

A box is (offset, shape) in the whole tensor's axes.

    a rank's flat range of a [4, 3] part          as boxes
        . . x
        x x x                                     [0:1, 2:3]  [1:3, 0:3]  [3:4, 0:1]
        x x x
        x . .
"""

import math
from collections.abc import Iterator

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]


def boxes_of_range(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The boxes that hold entries start .. stop - 1 of a tensor of this shape, in its row-major order."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield (0,) * len(shape), shape
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * inner, stop - last * inner)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * inner, inner if start % inner else 0)
    if first < last:
        yield (first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])
    yield from _in_row(shape, last, 0, stop - last * inner)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for offset, size in boxes_of_range(shape[1:], start, stop):
        yield (row, *offset), (1, *size)


def overlap(one: Box, other: Box) -> Box | None:
    """What two boxes of a tensor share, or None."""
    offset = tuple(max(a, b) for a, b in zip(one[0], other[0], strict=True))
    stop = tuple(min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    shape = tuple(end - begin for begin, end in zip(offset, stop, strict=True))
    return (offset, shape) if all(size > 0 for size in shape) else None


def slices_in(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where `box` lies in a tensor that holds `outer`."""
    return tuple(slice(a - b, a - b + n) for a, n, b in zip(*box, outer[0], strict=True))

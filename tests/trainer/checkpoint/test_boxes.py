"""Boxes against a tensor of indices."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.boxes import boxes_of_range, overlap, slices_in

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def cut(shape: tuple[int, ...], draw: st.DataObject) -> tuple[int, int]:
    size = math.prod(shape)
    start = draw.draw(st.integers(0, size))
    return start, draw.draw(st.integers(start, size))


@given(shapes, st.data())
def test_a_flat_range_is_cut_into_boxes_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    start, stop = cut(shape, data)
    whole, found = np.arange(math.prod(shape)).reshape(shape), list[int]()
    outer = (0,) * len(shape), shape
    boxes = list(boxes_of_range(shape, start, stop))
    for box in boxes:
        found += whole[slices_in(box, outer)].ravel().tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_what_two_boxes_share_is_what_both_hold(shape: tuple[int, ...], data: st.DataObject) -> None:
    sides = [[cut((size,), data) for size in shape] for _ in range(2)]
    boxes = [(tuple(a for a, _ in side), tuple(b - a for a, b in side)) for side in sides]
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[slices_in(box, ((0,) * len(shape), shape))] += 1
    shared = overlap(*boxes)
    assert (counts == 2).sum() == (math.prod(shared[1]) if shared else 0)
    if shared:
        assert (counts[slices_in(shared, ((0,) * len(shape), shape))] == 2).all()

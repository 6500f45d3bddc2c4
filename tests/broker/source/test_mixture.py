"""Streams that take turns by weight."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.source.prompt_order import Mixture
from slimebus.bus.errors import DataError


def _mixture(*weights: str) -> Mixture:
    return Mixture([Fraction(weight) for weight in weights])


def test_shares_are_exact_over_a_window_and_spread_within_it() -> None:
    mixture = _mixture("2", "1")
    assert mixture.window == 3
    assert [mixture.turn(position)[0] for position in range(6)] == [0, 1, 0, 0, 1, 0]


def test_decimal_weights_give_the_shortest_window() -> None:
    assert _mixture("0.7", "0.3").shares == [7, 3]
    assert _mixture("1.5", "0.5", "1").shares == [3, 1, 2]
    assert _mixture("4", "4").shares == [1, 1]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(0, 500))
def test_each_turn_is_found_again_and_no_stream_falls_a_turn_behind(weights: list[int], length: int) -> None:
    mixture = Mixture([Fraction(weight) for weight in weights])
    counts = [0] * len(weights)
    for position in range(length):
        stream, count = mixture.turn(position)
        assert count == counts[stream]
        assert mixture.position_of(stream, count) == position
        counts[stream] += 1
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - length * weight / sum(weights)) < 1.0 + (len(weights) > 2)


def test_weights_that_never_come_out_even_are_refused() -> None:
    with pytest.raises(DataError, match="rounder weights"):
        _mixture("0.123457", "1")

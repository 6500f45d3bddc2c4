"""A seeded order without an array of it."""

import itertools

import pytest

from broker.source.shuffle import Shuffle


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 16, 17, 100, 1009, 4096])
def test_every_row_comes_once_and_its_place_is_found_again(size: int) -> None:
    order = Shuffle(size, "k")
    rows = [order.row_at(place) for place in range(size)]
    assert sorted(rows) == list(range(size))
    assert [order.place_of(row) for row in rows] == list(range(size))


def test_the_order_never_changes_between_releases() -> None:
    assert [Shuffle(10, "slimebus/0/0/0").row_at(place) for place in range(10)] == [8, 7, 6, 1, 9, 2, 4, 5, 0, 3]


def test_every_order_of_three_rows_is_about_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for key in range(1200):
        order = Shuffle(3, str(key))
        rows = tuple(order.row_at(place) for place in range(3))
        counts[rows] = counts.get(rows, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 200) < 5 * 200**0.5 for count in counts.values()), counts


def test_the_first_place_is_spread_over_all_rows() -> None:
    size, keys = 50, 5000
    counts = [0] * size
    for key in range(keys):
        counts[Shuffle(size, str(key)).row_at(0)] += 1
    chi_square = sum((count - keys / size) ** 2 / (keys / size) for count in counts)
    assert chi_square < 94.6, "p < 0.0001 with 49 degrees of freedom"


def test_neighbours_do_not_stay_together() -> None:
    order = Shuffle(1000, "k")
    rows = [order.row_at(place) for place in range(1000)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(rows)) < 12, "2 are expected by chance"
    assert rows != [Shuffle(1000, "l").row_at(place) for place in range(1000)]


def test_a_thousand_million_rows_need_no_memory() -> None:
    order = Shuffle(10**9, "k")
    assert order.place_of(order.row_at(123_456_789)) == 123_456_789

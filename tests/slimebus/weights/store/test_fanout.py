"""The tree in which workers pull from each other."""

from collections import Counter

import pytest

from slimebus.weights.store.server import Fanout

NOW = ("L", 7)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("workers", [1, 2, 7, 32])
def test_nobody_serves_more_than_the_degree_and_all_hang_on_the_publisher(degree: int, workers: int) -> None:
    tree = Fanout(degree)
    sources = {f"w{i}": tree.source(NOW, 6, f"w{i}") for i in range(workers)}
    assert max(Counter(sources.values()).values()) <= degree
    for name in sources:
        path = [name]
        while path[-1]:
            path.append(sources[path[-1]])
            assert len(path) <= workers + 1, "a circle"


def test_asking_again_gives_the_same_answer() -> None:
    tree = Fanout(2)
    first = [tree.source(NOW, 6, f"w{i}") for i in range(9)]
    assert [tree.source(NOW, 6, f"w{i}") for i in range(9)] == first


def test_a_source_to_avoid_is_replaced_by_whoever_stands_above_it() -> None:
    tree = Fanout(2)
    for i in range(7):
        tree.source(NOW, 6, f"w{i}")
    assert tree.source(NOW, 6, "w6") == "w2"
    assert tree.source(NOW, 6, "w6", ["w2"]) == "w0"
    assert tree.source(NOW, 6, "w6", ["w2", "w0"]) == ""


def test_workers_with_another_base_stand_in_another_tree() -> None:
    tree = Fanout(1)
    assert [tree.source(NOW, base, name) for base, name in ((6, "a"), (5, "b"), (6, "c"), (5, "d"))] == ["", "", "a", "b"]


def test_a_newer_version_begins_new_trees() -> None:
    tree = Fanout(1)
    assert [tree.source(NOW, 6, "a"), tree.source(NOW, 6, "b"), tree.source(("L", 8), 7, "b")] == ["", "a", ""]


def test_a_worker_that_serves_nobody_is_served_and_takes_no_place() -> None:
    tree = Fanout(1)
    tree.source(NOW, 6, "a")
    assert [tree.source(NOW, 6, ""), tree.source(NOW, 6, ""), tree.source(NOW, 6, "b")] == ["a", "a", "a"]

"""How many threads the weights get."""

import os

import pytest

from slimebus.weights.threads import num_threads


@pytest.mark.parametrize(
    ("cores", "shared_by", "expected"),
    [(1, 1, 1), (2, 1, 1), (8, 1, 4), (128, 1, 8), (64, 8, 4), (4, 8, 1)],
)
def test_half_of_the_cores_are_shared_by_the_ranks_of_a_host_(
    monkeypatch: pytest.MonkeyPatch, cores: int, shared_by: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert num_threads(shared_by=shared_by) == expected

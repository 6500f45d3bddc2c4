"""How many threads the weights get."""

import os

import pytest

from slimebus.weights.cores import num_threads


@pytest.mark.parametrize(
    ("cores", "configured", "shared_by", "expected"),
    [(1, 0, 1, 1), (2, 0, 1, 1), (8, 0, 1, 4), (128, 0, 1, 8), (64, 0, 8, 4), (4, 0, 8, 1), (2, 16, 8, 16)],
)
def test_half_of_the_cores_are_shared_by_the_ranks_of_a_host_unless_a_number_is_given(
    monkeypatch: pytest.MonkeyPatch, cores: int, configured: int, shared_by: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert num_threads(configured, shared_by=shared_by) == expected

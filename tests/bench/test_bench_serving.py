"""`bench_serving`: what it publishes, and that a version gets to an engine."""

from pathlib import Path

import bench_serving
import numpy as np
import pytest


def test_the_small_model_is_as_large_as_the_quick_starts(tmp_path: Path) -> None:
    tensors = bench_serving.make_model(tmp_path / "model", bench_serving.COMMON | bench_serving.SMALL)
    assert sum(tensor.size for tensor in tensors.values()) == 448_320
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 2 * 448_320


def test_each_version_differs_in_two_percent_of_the_values() -> None:
    tensors = {"a": np.zeros((500, 1000), np.uint16), "b": np.full(30, 7, np.uint16)}
    steps = bench_serving.change(tensors)
    for _ in range(2):
        before = tensors["a"].copy()
        next(steps)
        assert np.mean(tensors["a"] != before) == pytest.approx(0.02, rel=0.1)


@pytest.mark.integration
def test_a_row_says_where_the_time_went() -> None:
    made = bench_serving.measure("small", bench_serving.SMALL, versions=1)
    assert made["ok"]
    stages = dict(part.split() for part in made["unit"].removeprefix("s: ").split(", "))
    assert tuple(stages) == bench_serving.STAGES
    assert 0 < sum(map(float, stages.values())) < made["value"]
    assert float(stages["load"]) > 0

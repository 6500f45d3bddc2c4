"""`bench_weights`: what it measures with stands in for parts of the product, which it has to keep up with."""

import bench_weights
import pytest


@pytest.mark.integration
def test_pulls_and_manifests_are_measured() -> None:
    made = [*bench_weights.pull_rows(1, turns=1), bench_weights.manifest_row(100)]
    assert [(row["name"], row["value"] > 0) for row in made] == [("pull_ratio", True), ("pull_curve_ratio", True), ("manifests_1k", True)]

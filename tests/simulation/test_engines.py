"""Many seeds of a worker's engines."""

import pytest
from simulation.campaign import faults_of, run_seed

SEEDS, PER_TEST = 600, 100


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_engines_serve_only_verified_versions_and_all_of_them_the_newest_once_faults_stop(base: int, first: int) -> None:
    outcomes = [run_seed(seed, what="engines") for seed in range(base + first, base + first + PER_TEST)]
    for outcome in outcomes:
        if outcome.broken:
            told = "\n".join([*outcome.recent, outcome.broken])
            pytest.fail(f"seed {outcome.seed} (again: bin/simtest --engines --seed {outcome.seed} --trace):\n{told}")
    assert min(faults_of(outcomes)[fault] for fault in ("hang", "die", "restart", "attach", "detach", "refused")) > PER_TEST // 2

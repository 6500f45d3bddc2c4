"""Many seeds of a worker's engines."""

import subprocess
import sys
from pathlib import Path

import pytest
from simulation.campaign import faults_of, run_seed

ROOT = Path(__file__).parents[2]
SEEDS, PER_TEST = 600, 100


@pytest.mark.parametrize("first", range(0, SEEDS, PER_TEST))
def test_engines_serve_only_verified_versions_and_all_of_them_the_newest_once_faults_stop(base: int, first: int) -> None:
    outcomes = [run_seed(seed, what="engines") for seed in range(base + first, base + first + PER_TEST)]
    for outcome in outcomes:
        if outcome.broken:
            told = "\n".join([*outcome.recent, outcome.broken])
            pytest.fail(f"seed {outcome.seed} (again: bin/simtest --engines --seed {outcome.seed} --trace):\n{told}")
    assert min(faults_of(outcomes)[fault] for fault in ("hang", "die", "restart", "attach", "detach", "refused")) > PER_TEST // 2


def test_a_seed_of_the_engines_replays_to_the_same_event_in_another_process() -> None:
    command = [sys.executable, str(ROOT / "tests/simulation/simtest.py"), "--engines", "--seed", "7", "--trace"]
    told = [
        subprocess.run(command, env={"PYTHONHASHSEED": seed, "PATH": ""}, capture_output=True, text=True, check=True, timeout=60).stdout
        for seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(told[0].splitlines()) > 100

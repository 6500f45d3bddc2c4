"""The bound, over whole runs: no token is trained that is older than eta versions; at eta 0 all are of the current one."""

from pathlib import Path

import pytest
from live_run import Run

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("eta", [0, 1, 2])
def test_no_trained_token_of_a_whole_run_is_older_than_the_bound(tmp_path: Path, task: Path, eta: int) -> None:
    with Run(
        tmp_path,
        task,
        broker__max_staleness=eta,
        rollout__num_rollout=10,
        rollout__rollout_max_response_len=48,
        trainer__mismatch_interval=1,
    ) as run:
        run.start_all()
        if eta == 2:
            run.start("rollout", name="w2")
        run.complete(10)
        lags = {int(lag): count for row in run.rows("batches") for lag, count in row["lag_tokens"].items()}
        assert 0 <= min(lags) <= max(lags) <= eta
        steps = run.rows("trainer")
        assert max(row["lag_max"] for row in steps) <= eta
        assert run.final_status()["lag"]["max"] <= eta
        if eta == 0:
            assert set(lags) == {0}
        else:
            assert sum(row["lag_mean"] for row in steps) > 0, "a bound above 0 was given and nothing ran ahead"
        mismatches = [row["logprob_mismatch_mean"] for row in steps if row["updated"]]
        assert all(0 < value < 0.5 for value in mismatches), "rollout (bf16-rounded) against trained weights"
        assert len(mismatches) >= 5
        stale = [row for row in steps if "mismatch/mean" in row]
        assert all(row["mismatch/mean"] < 1e-3 and row["mismatch/lag"] >= 1 for row in stale), "the CPU engine has the published weights"
        assert bool(stale) == (eta > 0)


def test_at_lag_0_the_trainers_logprobs_are_the_engines_at_any_temperature(tmp_path: Path, task: Path) -> None:
    changes = {"rollout__rollout_temperature": 0.7, "broker__max_staleness": 0, "rollout__num_rollout": 2}
    with Run(tmp_path, task, **changes) as run:
        assert run.start("up").wait(150) == 0
        assert max(row["logprob_mismatch_mean"] for row in run.rows("trainer")) < 0.01  # 0.2 where the trainer leaves it out

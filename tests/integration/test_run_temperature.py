"""Engine and trainer speak of the same distribution, at any temperature."""

from pathlib import Path

import pytest
from live_run import Run

pytestmark = pytest.mark.integration


def test_at_lag_0_the_trainers_logprobs_are_the_engines_at_any_temperature(tmp_path: Path, task: Path) -> None:
    changes = {"rollout__rollout_temperature": 0.7, "broker__max_staleness": 0, "rollout__num_rollout": 2}
    with Run(tmp_path, task, **changes) as run:
        assert run.start("up").wait(150) == 0
        assert max(row["logprob_mismatch_mean"] for row in run.rows("trainer")) < 0.01  # 0.2 where the trainer leaves it out

"""A sweep of real runs, killed in the middle: restarted it goes on, and loses and repeats nothing that was recorded."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_run import Run
from waiting import wait_until

from slimebus.view import report

pytestmark = pytest.mark.integration


def trial(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "trials" / name / "trial.json").read_text())
    return found


def test_a_sweep_that_is_killed_goes_on_where_it_was(tmp_path: Path, task: Path) -> None:
    supervised: dict[str, Any] = {  # without an engine, so that it starts in half the time
        "data__prompt_data": [f"{task}/sft.jsonl@[0:400]"],
        "rollout__custom_generate_function_path": "rollout.sft:demonstration",
        "engine__engine": "none",
        "algorithm__advantage_estimator": "sft",
    }
    with Run(tmp_path, task, rollout__num_rollout=4, trainer__save_interval=1, **supervised) as run:
        tree = {"run": "run.yaml", "sweep_dir": str(tmp_path / "out"), "grid": {"broker.max_staleness": [0, 2]}, "parallel": 2}
        (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "slimebus", "sweep", str(tmp_path / "sweep.yaml")]
        first = run.command("sweep", command)
        checkpoints = tmp_path / "out" / "trials" / "max_staleness=2,seed=0" / "checkpoints" / "latest"
        wait_until("a checkpoint", checkpoints.exists, 120)
        first.kill()
        assert trial(tmp_path / "out", "max_staleness=2,seed=0")["state"] == "running"

        second = run.command("sweep", command)
        second.ends(0)
        for eta in (0, 2):
            found = trial(tmp_path / "out", f"max_staleness={eta},seed=0")
            assert (found["state"], found["starts"]) == ("done", 2), second.tail()
            steps = report.read_report(tmp_path / "out" / "trials" / f"max_staleness={eta},seed=0").steps
            assert [row["step"] for row in steps] == [0, 1, 2, 3]
            assert max(row["lag_max"] for row in steps) <= eta
        run.assert_none_alive(within_s=10)

import json
from pathlib import Path
from typing import Any

import pytest

from slimebus.bus.errors import DataError
from slimebus.view import report


def step(number: int, **values: Any) -> dict[str, Any]:
    usual = {"wait_s": 0.1, "train_s": 0.8, "publish_s": 0.1, "save_s": 0.0, "lag_mean": 1.0, "lag_max": 2.0, "num_samples": 4.0}
    return {"time": 100.0 + number, "step": number, "elapsed_s": 1.0 + number, "reward": 0.5, **usual, **values}


def write(run_dir: Path, steps: list[dict[str, Any]]) -> None:
    (run_dir / "metrics").mkdir()
    (run_dir / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(s) + "\n" for s in steps))
    evals = [{"evaluation": "k", "dataset": "h", "version": v, "mean_reward": v / 10, "low": 0, "high": 1, "time": 100 + v} for v in (2, 0)]
    (run_dir / "metrics" / "broker.jsonl").write_text("".join(json.dumps(s) + "\n" for s in [*evals, {"step": 0}]))
    rows = [{"step": v, "busy_s": 1.0 * v, "serving_s": 2.0 * v} for v in range(10)]
    (run_dir / "metrics" / "rollout-w.jsonl").write_text("".join(json.dumps(s) + "\n" for s in rows))
    status = {"waste": {"stale": {"groups": 3, "tokens": 9}, "none": {"groups": 0, "tokens": 0}}, "counted": {"unused: zero_variance": 5}}
    (run_dir / "status.json").write_text(json.dumps(status))


def test_a_run_is_summarised_from_its_records(tmp_path: Path) -> None:
    weights = {"weights_delta_bytes": 10.0, "weights_total_bytes": 100.0}
    write(tmp_path, [step(0, wait_s=50.0), *(step(i, **weights) for i in range(1, 10))])
    found = report.read_report(tmp_path)
    assert report.summarise(found) == {
        "steps": 10,
        "lag_mean": 1.0,
        "lag_max": 2,
        "dropped": {"stale": 3, "zero_variance": 5},
        "delta_fraction": 0.1,
        "trainer_idle": 0.1,
        "worker_idle": 0.5,
    }
    assert [row["version"] for row in found.evaluations("h")] == [0, 2]


def test_a_step_trained_again_after_a_restart_counts_once(tmp_path: Path) -> None:
    write(tmp_path, [step(0), step(1, reward=0.1), step(1, reward=0.9)])
    assert [row["reward"] for row in report.read_report(tmp_path).steps] == [0.5, 0.9]


def test_a_directory_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trained step on record"):
        report.read_report(tmp_path)

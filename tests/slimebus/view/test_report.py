import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slimebus.bus.errors import DataError
from slimebus.view import report
from slimebus.view.report import Result, result_table, table_rows


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


def result() -> Result:
    return {
        "accuracy_before": 0.43,
        "accuracy_after": 0.953,
        "heldout_problems": 512,
        "steps": 120,
        "total_s": 214.0,
        "rl_s": 80.3,
        "lag_mean": 1.97,
        "lag_max": 2,
        "max_staleness": 2,
        "dropped": {"too_stale": 3, "zero_variance": 512},
        "delta_fraction": 0.131,
        "trainer_idle": 0.03,
        "worker_idle": 0.44,
        "seed": 0,
    }


def printed(values: object) -> str:
    console = Console(width=110, color_system=None)
    with console.capture() as capture:
        console.print(values)
    return capture.get()


def test_table_gives_each_figure_once() -> None:
    text = printed(result_table(result()))
    for part in (
        "0.430 (0.388–0.473) → 0.953 (0.931–0.968) on 512 problems",
        "80 s of RL, 214 s in all",
        "mean 1.97, largest 2, bound 2 versions",
        "512 groups with equal rewards, 3 too stale",
        "13.1% of the model",
    ):
        assert text.count(part) == 1


def test_no_drops_are_said() -> None:
    assert table_rows({**result(), "dropped": {}})["trained nothing"] == "none"


def test_what_was_not_measured_has_no_row() -> None:
    names = table_rows({key: value for key, value in result().items() if key != "worker_idle"})
    assert "workers idle" not in names
    assert "trainer idle" in names


def test_a_reward_outside_of_0_to_1_has_no_interval() -> None:
    assert table_rows({"accuracy_before": -0.5, "accuracy_after": 2.0, "heldout_problems": 8})["held-out reward"] == (
        "-0.500 → [bold green]2.000[/] on 8 problems"
    )

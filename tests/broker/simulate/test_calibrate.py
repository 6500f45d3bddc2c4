"""A simulation calibrated from a run's records predicts that run."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from made_status import WHOLE

from broker.simulate.calibrate import calibrate
from broker.simulate.simulated_run import simulate
from slimebus.bus.errors import DataError
from slimebus.cli.root import root

RULES = {
    "max_staleness": 2.0,
    "rollout_batch_size": 16,
    "n_samples_per_prompt": 4,
    "update_weights_interval": 1,
    "over_sampling_batch_size": 0,
}


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run of 40 steps: 64 samples of 50 to 150 tokens a step, trained in 2 s; one worker that makes 5,000 tokens/s while busy."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    steps = [
        {"step": i, "num_samples": 64, "num_tokens": 9000, "train_s": 2.0, "wait_s": 0.5, "elapsed_s": 2.75 * (i + 1), "lag_mean": 1.0}
        for i in range(40)
    ]
    write_lines(metrics / "trainer.jsonl", steps)
    write_lines(metrics / "batches.jsonl", [{"step": i, "lengths": [50, 100, 150]} for i in range(40)])
    rows = [
        {"step": i, "tokens": 6400.0 * i, "samples": 64.0 * i, "busy_s": 1.28 * i, "running": 8.0, "sync_s": 0.3, "serving_s": 2.75 * i}
        for i in range(40)
    ]
    write_lines(metrics / "rollout-w1.jsonl", rows)
    spans = [{"name": "sample", "kind": "train", "seconds": 0.5 + 0.01 * i} for i in range(100)]
    write_lines(metrics / "spans-w1.jsonl", [*spans, {"name": "pull", "seconds": 9.0}])
    (tmp_path / "status.json").write_text(json.dumps({**WHOLE, "settings": RULES}))
    return tmp_path


def test_every_value_is_what_the_run_measured(run_dir: Path) -> None:
    found = calibrate(run_dir)
    assert (found.batch, found.samples, found.max_staleness, found.workers, found.groups_per_worker) == (16, 4, 2, 1, 8)
    assert found.lengths == (50, 100, 150)
    assert found.worker_tokens_per_s == pytest.approx(5000)
    assert found.train_seconds(64 * 100) == pytest.approx(2.0)
    assert found.publish_s == pytest.approx(0.25)
    assert found.pull_s == pytest.approx(0.3)
    assert found.token_s == pytest.approx(0.55 / 150)


def test_its_simulation_has_the_pace_of_the_slower_side(run_dir: Path) -> None:
    assert simulate(calibrate(run_dir)).steps_per_s == pytest.approx(1 / 2.25, rel=0.02)
    slower = msgspec.structs.replace(calibrate(run_dir), worker_tokens_per_s=1000.0)
    assert simulate(slower).steps_per_s == pytest.approx(1000 / 6400, rel=0.05)


def test_a_run_without_records_of_workers_is_refused(run_dir: Path) -> None:
    (run_dir / "metrics" / "rollout-w1.jsonl").unlink()
    with pytest.raises(DataError, match="no records of workers"):
        calibrate(run_dir)


def test_the_command_shows_each_combination_and_how_many_workers_to_add(run_dir: Path, tmp_path: Path) -> None:
    words = [
        "simulate",
        "--from",
        str(run_dir),
        "--worker-tokens-per-s",
        "1000",
        "--max-staleness",
        "1,2",
        "--plot",
        str(tmp_path / "x.png"),
    ]
    done = CliRunner().invoke(root, words)
    lines = done.output.splitlines()
    assert lines[0].split("  ")[0] == "max staleness"
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert "more workers like these would make it the bottleneck" in lines[3]
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_the_command_as_json_has_the_histogram(run_dir: Path) -> None:
    done = CliRunner().invoke(root, ["simulate", "--from", str(run_dir), "--workers", "2", "--seed", "3", "--json"])
    row = json.loads(done.output)
    assert (row["workers"], row["seed"]) == (2, 3)
    assert sum(row["lag_tokens"].values()) > 0
    assert row["formula"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2"], "give --from RUN_DIR"),
        (["--mean-length", "9", "--workers", "two"], "--workers 'two'; expected a number"),
        (["--mean-length", "9", "--workers", "0"], "workers"),
        (["--mean-length", "9", "--batch", "1.5"], "batch"),
        (["--mean-length", "9", "--max-staleness", "1.5"], "max_staleness"),
        (["--mean-length", "9", "--plot", "x.png"], "--plot needs an option with several values"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(words: list[str], message: str) -> None:
    done = CliRunner().invoke(root, ["simulate", "--steps", "3", *words])
    assert message in str(done.exception)

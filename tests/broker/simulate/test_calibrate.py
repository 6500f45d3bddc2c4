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
from slimebus.config import Resolved, RunConfig
from slimebus.config.saved import save_config
from slimebus.config.schema import RolloutConfig

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
    assert simulate(found).worker_tokens_per_s == pytest.approx(5000, rel=0.02)
    assert (found.cores, found.eval_samples) == (0, 0)
    assert found.train_seconds(64 * 100) == pytest.approx(2.0)
    assert found.publish_s == pytest.approx(0.25)
    assert found.pull_s == pytest.approx(0.3)
    assert found.token_s == pytest.approx(0.55 / 150)


def test_a_trainer_that_waited_for_cores_shares_them_with_workers(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    spans = [{"name": "train", "step": i, "seconds": 2.0, "cpu_s": 1.6, "queued_s": 0.4} for i in range(40)]
    write_lines(run_dir / "metrics" / "spans-trainer.jsonl", spans)
    found = calibrate(run_dir)
    assert found.train_seconds(64 * 100) == pytest.approx(1.6)
    busy = 1.28 / 2.75
    beside = 1 - 0.2 / busy  # the pace while the worker is busy
    assert (found.cores, found.worker_cores) == (2, pytest.approx(2 / beside - 1, rel=0.02))
    assert calibrate(run_dir, 8.0).worker_cores == pytest.approx(8 / beside - 1, rel=0.02)


def test_time_without_tokens_is_told_from_the_steps_that_trained_fewer(run_dir: Path) -> None:
    steps = [json.loads(line) for line in (run_dir / "metrics" / "trainer.jsonl").read_text().splitlines()]
    for i, row in enumerate(steps):
        row["tokens_trained"] = 3000 + 50 * (i % 8)
        row["train_s"] = 0.4 + row["tokens_trained"] / 2000
    write_lines(run_dir / "metrics" / "trainer.jsonl", steps)
    found = calibrate(run_dir)
    assert found.step_s == pytest.approx(0.4)
    trained = sum(row["tokens_trained"] for row in steps[5:]) / 35
    assert found.trainer_tokens_per_s == pytest.approx(2000 * 6400 / trained)


def test_evaluations_and_groups_at_once_are_those_of_the_run(run_dir: Path) -> None:
    status = json.loads((run_dir / "status.json").read_text())
    status["settings"]["eval_interval"] = 10
    (run_dir / "status.json").write_text(json.dumps(status))
    rows = [{"evaluation": f"e{v}", "dataset": d, "version": v, "num_samples": n} for v in (0, 10) for d, n in (("a", 30), ("b", 12))]
    write_lines(run_dir / "metrics" / "broker.jsonl", rows)
    config = RunConfig(rollout=RolloutConfig(max_running_groups=24))
    save_config(Resolved(msgspec.structs.replace(config, run_dir=str(run_dir)), {}, run_dir))
    found = calibrate(run_dir)
    assert (found.eval_interval, found.eval_samples, found.groups_per_worker) == (10, 42, 24)


def test_its_simulation_has_the_pace_of_the_slower_side(run_dir: Path) -> None:
    assert simulate(calibrate(run_dir)).steps_per_s == pytest.approx(1 / 2.25, rel=0.02)
    slower = msgspec.structs.replace(calibrate(run_dir), worker_tokens_per_s=1000.0)
    assert simulate(slower).steps_per_s == pytest.approx(1000 / 6400, rel=0.05)


def test_a_run_without_records_of_workers_is_refused(run_dir: Path) -> None:
    (run_dir / "metrics" / "rollout-w1.jsonl").unlink()
    with pytest.raises(DataError, match="no records of workers"):
        calibrate(run_dir)


@pytest.mark.parametrize("status", ["", "[1]", "{}", '{"settings": {}}'])
def test_damaged_records_are_refused_in_words(run_dir: Path, status: str) -> None:
    (run_dir / "status.json").write_text(status)
    done = CliRunner().invoke(root, ["simulate", "--from", str(run_dir)])
    assert isinstance(done.exception, DataError)


def test_a_short_run_is_said_to_tell_little(run_dir: Path) -> None:
    for name in ("trainer", "rollout-w1"):
        file = run_dir / "metrics" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:12]))
    done = CliRunner().invoke(root, ["simulate", "--from", str(run_dir), "--steps", "5"])
    assert "has 12 steps: too few to tell how fast it goes; take a run of 100 or so" in done.stderr


def test_an_infinite_bound_is_none_in_json(run_dir: Path) -> None:
    done = CliRunner().invoke(root, ["simulate", "--from", str(run_dir), "--max-staleness", "inf", "--steps", "5", "--json"])
    assert json.loads(done.output, parse_constant=pytest.fail)["max_staleness"] is None


def test_the_command_shows_each_combination_and_how_many_workers_to_add(run_dir: Path) -> None:
    words = ["simulate", "--from", str(run_dir), "--worker-tokens-per-s", "1000", "--max-staleness", "1,2"]
    done = CliRunner().invoke(root, words)
    lines = done.output.splitlines()
    assert lines[0].split("  ")[0] == "max staleness"
    assert [line.split()[0] for line in lines[1:3]] == ["1", "2"]
    assert "more workers like these would make it the bottleneck" in lines[3]
    values = " ".join(lines[4:])
    assert "--batch 16 --samples 4 --publish-interval 1 " in values, "without the bound, which stands in the table"
    assert "--pull-s 0.3 " in values
    assert "; lengths 50 to 150 with a mean of 100 tokens" in values
    assert lines[-1].startswith(f"{run_dir} itself: measured 0.364 steps/s, mean lag 1.00, predicted 0.44")


def test_the_command_as_json_has_the_histogram(run_dir: Path) -> None:
    done = CliRunner().invoke(root, ["simulate", "--from", str(run_dir), "--workers", "2", "--seed", "3", "--json"])
    row = json.loads(done.output)
    assert (row["workers"], row["seed"]) == (2, 3)
    assert sum(row["lag_tokens"].values()) > 0
    assert (row["values"]["batch"], row["values"]["lengths"], row["values"]["trainer_tokens_per_s"]) == (16, [50, 100, 150], 3200)
    assert [round(value, 2) for value in row["measured"]] == [0.36, 1.0]
    assert row["predicted"][0] == pytest.approx(1 / 2.25, rel=0.02)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", "2"], "give --from RUN_DIR"),
        (["--mean-length", "9", "--workers", "two"], "--workers 'two'; expected a number"),
        (["--mean-length", "9", "--workers", "0"], "workers"),
        (["--mean-length", "9", "--batch", "1.5"], "batch"),
        (["--mean-length", "9", "--max-staleness", "1.5"], "max_staleness"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(words: list[str], message: str) -> None:
    done = CliRunner().invoke(root, ["simulate", "--steps", "3", *words])
    assert message in str(done.exception)

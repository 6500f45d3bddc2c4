"""The quick start, short but whole: interrupted, resumed, and visibly learning."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from live_run import ROOT, Process, Run

pytestmark = pytest.mark.integration

KEYS = (
    *("accuracy_before", "accuracy_after", "steps", "total_s", "rl_s", "lag_mean", "lag_max", "dropped", "delta_fraction"),
    *("trainer_idle", "worker_idle", "seed"),
)
STEPS = 10
LEAVE_S = 10.0


def quickstart(run: Run, *flags: str) -> Process:
    words = [str(ROOT / "configs/quickstart/quickstart.py"), "--run-dir", str(run.run_dir), "--warm-up-steps", "200", "--steps", str(STEPS)]
    return run.command("quickstart", [sys.executable, *words, *flags])


def trained_steps(run: Run) -> int:
    file = run.run_dir / "rl" / "metrics" / "trainer.jsonl"
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.timeout(600)
def test_the_quick_start_learns_and_can_be_interrupted_and_resumed(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        first = quickstart(run)
        deadline = time.monotonic() + 200
        while trained_steps(run) < 3:
            assert first.popen.poll() is None, first.tail()
            assert time.monotonic() < deadline, first.tail()
            time.sleep(0.2)
        started = time.monotonic()
        first.send(signal.SIGINT)
        assert first.wait(LEAVE_S) == 130
        run.assert_none_alive(within_s=LEAVE_S)
        assert time.monotonic() - started < LEAVE_S
        assert "--resume" in first.text()

        second = quickstart(run, "--resume")
        second.ends(0, 300)
        run.assert_none_alive(within_s=2.0)

        result = json.loads((run.run_dir / "result.json").read_text())
        assert set(KEYS) <= set(result)
        assert result["steps"] == STEPS
        assert result["seed"] == 0
        assert result["lag_max"] <= result["max_staleness"] == 2
        assert 0 < result["delta_fraction"] < 0.5
        assert result["accuracy_after"] > result["accuracy_before"] + 0.2, result
        assert (run.run_dir / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert (run.run_dir / "rl" / "hf" / "model.safetensors").is_file()

"""A run of real processes with prompts and rewards of an environment of verifiers."""

import json
import shutil
from pathlib import Path

import pytest
from live_run import ROOT, Run
from slimebus_command import slimebus

from slimebus.view import report

pytest.importorskip("verifiers")
pytestmark = pytest.mark.integration

STEPS = 3
HOOKS = """
class Watch:
    groups = 0

    def is_trained(self, sample):
        return sample.trajectory != 0

    def on_group(self, samples, is_kept, task):
        self.groups += 1

    def log(self):
        return {"groups_seen": self.groups}
"""


def test_the_samples_of_an_environment_are_trained(tmp_path: Path, task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = {
        "rollout__environment": "sums",
        "rollout__hooks_path": "watch.py:Watch",
        "rollout__num_rollout": STEPS,
        "data__prompt_data": ["environment@[4:]"],
        "eval__datasets": {"held": {"path": "environment@[1:4]"}},
        "trainer__save_interval": 0,
    }
    with Run(tmp_path, task, **changes) as run:
        shutil.copytree(ROOT / "tests/fixtures/environment/sums", tmp_path / "sums")
        (tmp_path / "watch.py").write_text(HOOKS)
        run.start_all()
        run.complete(STEPS)
        rows = run.rows("trainer")
        assert len(rows) == STEPS
        assert any(row["grad_norm"] > 0 for row in rows), rows
        held = report.read_report(run.run_dir).evaluations("held")
        assert [row["version"] for row in held] == [0, STEPS]
        assert all(row["num_samples"] == 3 and row["num_failed"] == 0 for row in held)
        assert run.rows("rollout-w1")[-1]["groups_seen"] >= 4 * STEPS + 2 * 3
    checkpoint = run.run_dir / "checkpoints" / f"step_{STEPS:08d}"
    done = slimebus("eval", run.file, "--model", checkpoint, "--json", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["model"] == str(checkpoint)
    assert row["mean_reward"] == pytest.approx(held[-1]["mean_reward"]), "greedy, of the same weights"

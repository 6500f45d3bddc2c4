"""Settings changed in the middle of a live run: no process restarts, and each token's lag obeys the bound of its step."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from live_run import Run

pytestmark = pytest.mark.integration


def change(run: Run, *words: str) -> dict[str, Any]:
    """What `slimebus set WORDS --json` prints."""
    process = run.command("set", [sys.executable, "-m", "slimebus", "set", str(run.file), *words, "--json"])
    assert process.wait() == 0, process.tail()
    answer: dict[str, Any] = json.loads(process.text())
    return answer


def test_bound_batch_group_size_and_pace_change_in_a_live_run(tmp_path: Path, task: Path) -> None:
    # 4 groups of 4 samples in 2 optimizer steps, then 5 groups of 2 samples on-policy, then a version every second step
    with Run(
        tmp_path, task, broker__max_staleness=3, rollout__num_rollout=30, rollout__num_steps_per_rollout=2, trainer__save_interval=7
    ) as run:
        run.start_all()
        run.wait_for("three steps", lambda s: s["step"] >= 3)
        lower = change(run, "max-staleness", "0", "rollout-batch-size", "5", "n-samples-per-prompt", "2")
        assert lower["changed"] == {"max_staleness": [3, 0], "rollout_batch_size": [4, 5], "n_samples_per_prompt": [4, 2]}
        first = lower["step"]
        run.wait_for("on-policy steps", lambda s: s["step"] >= first + 4)
        second = change(run, "max-staleness=1", "weights.update_weights_interval=2")["step"]
        status = run.wait_for("steps at half the pace", lambda s: s["step"] >= second + 4)
        assert [c["step"] for c in status["changes"]] == [first, second]
        run.complete(240.0)

        rows = run.trained()
        assert sorted(rows) == list(range(30))
        assert [len(rows[step]["groups"]) for step in rows] == [4] * first + [5] * (30 - first)
        ids = [group for row in rows.values() for group in row["groups"]]
        assert len(set(ids)) == len(ids)
        bounds = [3 if step < first else 0 if step < second else 1 for step in range(30)]
        worst = [max(map(int, rows[step]["lag_tokens"])) for step in range(30)]
        assert all(lag <= bound for lag, bound in zip(worst, bounds, strict=True)), list(zip(worst, bounds, strict=True))
        assert set(worst[first:second]) == {0}
        versions = [rows[step]["version"] for step in range(30)]
        assert versions[: second + 1] == list(range(second + 1)), "one version a step until then"
        assert versions[-1] - versions[second] in ((29 - second) // 2, (30 - second) // 2)
        steps = {row["step"]: row for row in run.rows("trainer")}
        assert steps[29]["num_samples"] == 10
        saved = json.loads((run.run_dir / "checkpoints" / "step_00000030" / "state.json").read_text())
        assert saved["progress"]["version"] == run.final_status()["version"]

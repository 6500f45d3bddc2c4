"""A worker that gets SIGTERM in the middle of its samples."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from live_run import Process, Run
from weight_run import ENGINE_KEY, ask

pytestmark = pytest.mark.integration


def engine_of(worker: Process) -> str:
    """The URL of the engine that a worker started."""
    for child in worker.family():
        words = child.cmdline() if psutil.pid_exists(child.pid) else []
        if "rollout.embedded" in words:
            return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    raise AssertionError("no engine")


def freeze_in_the_middle(run: Run, url: str) -> None:
    """Pause the engine at a moment when it is decoding."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ask(url, "/pause_generation", {"mode": "in_place"})
        if ask(url, "/server_info")["internal_states"][0]["num_running_reqs"]:
            return
        ask(url, "/continue_generation", {})
        run.assert_healthy("decoding")
    raise AssertionError("the engine was never found decoding")


def test_what_a_stopped_worker_has_begun_is_continued_by_another(tmp_path: Path, task: Path) -> None:
    # One version throughout: a worker that loads another one lets its engine go on afterwards, however it was paused.
    changes = {"rollout__num_rollout": 12, "data__prompt_data": [f"{task}/rl.jsonl@[0:1000]"], "weights__update_weights_interval": 12}
    with Run(tmp_path, task, engine__engine_api_key=ENGINE_KEY, rollout__drain_timeout_s=20.0, broker__lease_s=60, **changes) as run:
        *_, first = run.start_all()
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        freeze_in_the_middle(run, engine_of(first))
        first.send(signal.SIGTERM)
        assert first.wait() == 0
        left = run.wait_for("the partial", lambda s: s["counted"].get("partials kept"))
        assert left["groups"]["leased"] == 0
        run.start("rollout", name="w2")
        run.complete(12)
        final = run.final_status()
        assert final["counted"]["partials continued"] == final["counted"]["partials kept"]
        assert "returned: worker left" not in final["waste"]

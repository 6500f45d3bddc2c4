"""A worker that gets SIGTERM in the middle of its samples."""

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from live_run import Process, Run

pytestmark = pytest.mark.integration
KEY = {"Authorization": "Bearer of the test"}


def engine_of(worker: Process) -> str:
    """The URL of the engine that a worker started."""
    for child in worker.family():
        words = child.cmdline() if psutil.pid_exists(child.pid) else []
        if "rollout.embedded" in words:
            return f"http://127.0.0.1:{words[words.index('--port') + 1]}"
    raise AssertionError("no engine")


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **KEY})
    urllib.request.urlopen(request, timeout=10).close()


def running(url: str) -> int:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/server_info", headers=KEY), timeout=10) as reply:
        return int(json.load(reply)["internal_states"][0]["num_running_reqs"])


def freeze_in_the_middle(run: Run, url: str) -> None:
    """Pause the engine at a moment when it is decoding."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        post(f"{url}/pause_generation", {"mode": "in_place"})
        if running(url):
            return
        post(f"{url}/continue_generation", {})
        run.assert_healthy("decoding")
    raise AssertionError("the engine was never found decoding")


def test_what_a_stopped_worker_has_begun_is_continued_by_another(tmp_path: Path, task: Path) -> None:
    # One version throughout: a worker that loads another one lets its engine go on afterwards, however it was paused.
    changes = {"rollout__num_rollout": 12, "data__prompt_data": [f"{task}/rl.jsonl@[0:1000]"], "weights__update_weights_interval": 12}
    with Run(tmp_path, task, engine__engine_api_key="of the test", rollout__drain_timeout_s=20.0, broker__lease_s=60, **changes) as run:
        *_, first = run.start_all()
        run.wait_for("a trained step", lambda s: s["step"] >= 1)
        freeze_in_the_middle(run, engine_of(first))
        first.send(signal.SIGTERM)
        assert first.wait() == 0
        left = run.wait_for("the partial", lambda s: s["counted"].get("partials kept"))
        assert left["groups"]["leased"] == 0
        run.start("rollout", name="w2")
        run.complete(timeout_s=120)
        run.assert_accounted(12)
        final = run.final_status()
        assert final["counted"]["partials continued"] == final["counted"]["partials kept"]
        assert "returned: worker left" not in final["waste"]

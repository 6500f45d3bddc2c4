"""Three terminals, started in any order."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from live_run import ROOT, Run, clients

pytestmark = pytest.mark.integration


def test_processes_started_in_the_wrong_order_find_each_other_within_seconds_and_finish(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        run.start("rollout", name="w1")
        run.start("trainer")
        time.sleep(3)
        run.start("broker")
        run.wait_for("a broker", lambda s: True)
        found = time.monotonic()
        run.wait_for("trainer and worker", lambda s: clients(s, "trainer") and clients(s, "rollout"))
        assert time.monotonic() - found < 10
        asked = subprocess.run(
            [sys.executable, "-m", "slimebus", "status", "--broker", run.address, "--json"],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=ROOT,
            check=True,
        )
        assert {c["role"] for c in json.loads(asked.stdout)["clients"]} >= {"trainer", "rollout"}
        run.complete()
        run.assert_accounted(num_steps=6)


def test_a_trainer_that_loads_its_model_is_heard_meanwhile(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        run.start("trainer", is_forked=False)  # a forked one has loaded before anybody looks
        run.wait_for("a trainer that loads", lambda s: any(c["state"] == "starting: loads its model" for c in clients(s, "trainer")))


def test_a_worker_that_starts_is_heard_meanwhile_and_says_what_it_waits_for(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        run.start("rollout", is_forked=False)  # nor the engine, which is ready at once when it is forked
        seen: set[str] = set()

        def is_syncing(status: dict[str, Any]) -> bool:
            seen.update(client["state"] for client in clients(status, "rollout"))
            return "syncing" in seen

        run.wait_for("a worker whose engine is ready", is_syncing)
        assert "starting: waits for its engine" in seen
        assert "gone" not in seen

"""Workers of a run that pull their weights from each other."""

from pathlib import Path
from typing import Any

import pytest
from live_run import Run, clients, slow_hook

pytestmark = pytest.mark.integration


def passed_on(status: dict[str, Any]) -> float:
    return sum(c["metrics"].get("passed_on_bytes", 0) for c in clients(status, "rollout"))


def own_memory(folder: Path, name: str) -> str:
    """As on hosts of their own: workers of one host share what one of them pulls."""
    (folder / name).mkdir()
    return str(folder / name)


def test_workers_pass_weights_on_and_one_that_is_killed_is_gone_around(tmp_path: Path, task: Path) -> None:
    hook = slow_hook(tmp_path, 0.3)
    changes = {"weights__fanout_bind": "tcp://127.0.0.1:0", "rollout__num_rollout": 16}
    with Run(tmp_path, task, rollout__custom_generate_function_path=hook, broker__lease_s=3, **changes) as run:
        for role in ("broker", "trainer"):
            run.start(role)
        workers = [run.start("rollout", "--weights-shm", own_memory(tmp_path, f"w{i}"), name=f"w{i}") for i in range(3)]
        run.wait_for("weights that were passed on", lambda s: s["step"] >= 3 and passed_on(s) > 0)
        workers[0].kill()
        run.complete(timeout_s=120)
        run.assert_accounted(16)
        failures = [c["metrics"].get("pull_failures", 0) for c in run.final_status()["clients"] if c["role"] == "rollout"]
        assert not any(failures), "a worker was left without weights"

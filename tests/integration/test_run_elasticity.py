"""A worker added while the run goes on."""

import time
from pathlib import Path
from typing import Any

import pytest
from live_run import Run, clients

pytestmark = pytest.mark.integration

GROUP_S = 1.0
WINDOW_S = 6.0


def finished(status: dict[str, Any]) -> int:
    """Groups sampled so far."""
    return sum(count for move, count in status["moves"].items() if move.startswith("leased>ready"))


def rate(run: Run) -> float:
    """Groups a second, over a window that begins and ends right after a group was finished."""
    edge = run.wait_for("a status", lambda s: True)
    begin = run.wait_for("a finished group", lambda s: finished(s) > finished(edge))
    started = time.monotonic()
    time.sleep(WINDOW_S)
    edge = run.wait_for("a status", lambda s: True)
    end = run.wait_for("a finished group", lambda s: finished(s) > finished(edge))
    return (finished(end) - finished(begin)) / (time.monotonic() - started)


def test_a_second_worker_raises_the_rate_and_has_verified_weights_before_its_first_lease(tmp_path: Path, task: Path) -> None:
    with Run(
        tmp_path,
        task,
        slow_s=GROUP_S,
        rollout__num_rollout=200,
        rollout__max_running_groups=2,
        broker__max_staleness=4,
        data__prompt_data=[f"{task}/rl.jsonl@[0:1000]"],
    ) as run:
        run.start_all()
        run.wait_for("two trained steps", lambda s: s["step"] >= 2)
        alone = rate(run)
        run.start("rollout", name="w2")

        def second(status: dict[str, Any]) -> dict[str, Any]:
            return next((c for c in clients(status, "rollout") if c["name"] == "w2"), {})

        seen = []

        def has_lease(status: dict[str, Any]) -> bool:
            seen.append(second(status))
            return bool(seen[-1].get("leases"))

        found = run.wait_for("w2's first lease", has_lease)
        assert not any(s.get("leases") for s in seen if s.get("version", -1) < 0), "it held a lease before it had weights"
        first = second(found)
        assert first["version"] >= 2
        assert first["lineage"] == found["lineage"]
        assert first["metrics"]["pulled_bytes"] + first["metrics"]["neighbour_bytes"] > 0
        assert first["metrics"]["pull_failures"] == 0
        together = rate(run)
        assert together > 1.3 * alone, f"{alone:.2f} groups/s alone, {together:.2f} with a second worker"

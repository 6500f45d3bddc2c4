"""Processes started in any order, by hand or by `slimebus up`, on a new run and on a finished one that gets more steps."""

import time
from pathlib import Path
from typing import Any

import pytest
from live_run import Run, clients

pytestmark = pytest.mark.integration

ORDERS = (("broker", "rollout", "trainer"), ("rollout", "trainer", "broker"), ("trainer", "broker", "rollout"))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_run_and_its_continuation_find_each_other_in_any_order(tmp_path: Path, task: Path, order: tuple[str, ...]) -> None:
    with Run(tmp_path, task) as run:
        for steps in (2, 4):
            for role in order:
                run.start(role, "--num-rollout", str(steps), name="w1" if role == "rollout" else "")
                if role != order[-1]:
                    time.sleep(1.0)
            if order[-1] == "broker":
                run.wait_for("a broker", lambda s: True)
                found = time.monotonic()
                run.wait_for("trainer and worker", lambda s: clients(s, "trainer") and clients(s, "rollout"))
                assert time.monotonic() - found < 10
            run.complete(steps)


def test_up_with_more_steps_goes_on_again_and_again(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        for steps in (2, 3, 4):
            up = run.start("up", "--num-rollout", str(steps))
            up.ends(0)
            run.assert_accounted(steps)


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

        run.wait_for("a worker with an engine that is ready", is_syncing)
        assert "starting: waits for its engine" in seen
        assert "gone" not in seen

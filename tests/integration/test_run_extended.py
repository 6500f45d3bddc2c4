"""A finished run that is started again with more steps goes on, in whatever order its processes come."""

import time
from pathlib import Path

import pytest
from live_run import Run

pytestmark = pytest.mark.integration


def test_up_with_more_steps_goes_on_again_and_again(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task) as run:
        for steps in (2, 3, 4):
            up = run.start("up", "--num-rollout", str(steps))
            assert up.wait() == 0, up.tail()
            run.assert_accounted(steps)


ORDERS = (("broker", "rollout", "trainer"), ("rollout", "trainer", "broker"), ("trainer", "broker", "rollout"))


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_finished_run_goes_on_with_its_processes_started_in_any_order(tmp_path: Path, task: Path, order: tuple[str, ...]) -> None:
    with Run(tmp_path, task) as run:
        for steps in (2, 4):
            for role in order if steps == 4 else ("broker", "trainer", "rollout"):
                run.start(role, "--num-rollout", str(steps), name="w1" if role == "rollout" else "")
                time.sleep(3.0 if steps == 4 else 0.0)
            run.complete(timeout_s=300)
            run.assert_accounted(steps)

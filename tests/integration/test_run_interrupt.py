"""Ctrl-C, and going on afterwards."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from live_run import Process, Run

pytestmark = pytest.mark.integration

LEAVE_S = 5.0


def press_ctrl_c(run: Run, process: Process) -> float:
    """What a terminal does: SIGINT to the foreground process group. Seconds until no process of the run is left."""
    process.expected.add(130)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    process.wait(LEAVE_S + 5)
    run.assert_none_alive(within_s=LEAVE_S)
    return time.monotonic() - started


def test_ctrl_c_ends_up_and_all_it_started_and_up_again_completes_the_run(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3, rollout__num_rollout=8) as run:
        early = run.start("up")
        run.wait_for("a broker", lambda s: True)
        assert press_ctrl_c(run, early) < LEAVE_S, "while trainer and engine are starting"
        assert early.popen.returncode == 130

        middle = run.start("up", "--workers", "2")
        before = run.wait_for("a step after a checkpoint", lambda s: s["oldest_checkpoint"] >= 2 and s["step"] >= 3)
        assert press_ctrl_c(run, middle) < LEAVE_S, "while it trains"
        assert middle.popen.returncode == 130

        last = run.start("up")
        last.ends(0)
        run.assert_none_alive(within_s=1.0)
        run.assert_accounted(num_steps=8)
        rows = run.rows("batches")
        resumed = [row["step"] for row in rows if row["lineage"] == rows[-1]["lineage"]]
        assert resumed[0] >= before["oldest_checkpoint"], "it went on from a checkpoint"
        for role in ("broker", "trainer", "rollout"):
            assert f"{role:>9} | " in last.text(), "one log with the role in front"


@pytest.mark.parametrize(("number", "within_s"), [(signal.SIGTERM, LEAVE_S), (signal.SIGKILL, 20.0)])
def test_nothing_outlives_up(tmp_path: Path, task: Path, number: signal.Signals, within_s: float) -> None:
    """After kill -9 nobody is left to hurry the roles, and each gives the vanished others a second to answer."""
    with Run(tmp_path, task, rollout__num_rollout=1000) as run:
        up = run.start("up")
        run.wait_for("a serving worker", lambda s: s["groups"]["leased"] > 0 or s["step"] > 0)
        up.send(number)
        up.wait(LEAVE_S)
        run.assert_none_alive(within_s=within_s)


def test_a_trainer_that_is_told_to_stop_saves_the_step_it_is_at_and_goes_on_from_there(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, slow_s=0.3, trainer__save_interval=0, rollout__num_rollout=8) as run:
        run.start("broker")
        run.start("rollout", name="w1")
        trainer = run.start("trainer")
        run.wait_for("three steps", lambda s: s["step"] >= 3)
        trainer.send(signal.SIGTERM)
        trainer.ends(0)
        stopped = re.search(r"stopped before step (\d+); all steps before it are saved", trainer.text())
        assert stopped, trainer.tail()
        run.start("trainer")
        run.complete(8)
        assert [row["step"] for row in run.rows("batches")].count(int(stopped[1]) - 1) == 1, "nothing saved is trained again"


def test_a_trainer_whose_broker_is_gone_leaves_soon_and_says_what_is_lost(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, trainer__save_interval=0, rollout__num_rollout=1000) as run:
        broker = run.start("broker")
        run.start("rollout", name="w1")
        trainer = run.start("trainer")
        run.wait_for("three steps", lambda s: s["step"] >= 3)
        broker.kill()
        trainer.send(signal.SIGTERM)
        trainer.ends(0, 20)
        assert "interrupted without saving; the run goes on from step 0" in trainer.text()

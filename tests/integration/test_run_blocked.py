"""A hook that blocks its worker's event loop: named with its line, a failed attempt of its group, and no run stands still for it."""

import signal
from pathlib import Path

import pytest
from live_run import Process, Run, clients

pytestmark = pytest.mark.integration

BLOCKS = """
import time

async def generate(session):
    if session.task.group.endswith("/1"):
        time.sleep(1e6)
    await session.generate()
"""
LINE = "blocks.py:6"
LEAVE_S = 30.0
"""A blocked loop has 5 s; the rest is a busy machine's."""


def blocking_run(folder: Path, task: Path, lease_s: float) -> Run:
    (folder / "blocks.py").write_text(BLOCKS)
    changes = {"broker__lease_s": lease_s, "broker__max_attempts": 2, "data__rollout_shuffle": False}
    return Run(folder, task, rollout__custom_generate_function_path="blocks.py:generate", **changes)


def blocked(run: Run, worker: Process) -> None:
    """Wait until the status says that a worker is blocked, and where."""
    found = run.wait_for("a blocked worker", lambda s: any("blocked" in c["state"] for c in clients(s, "rollout")))
    (row,) = clients(found, "rollout")
    assert row["state"].startswith("blocked for ")
    assert row["state"].endswith(f"/{LINE}")
    assert [sentence for sentence in found["waiting"] if f"rollout {worker.name} is blocked for" in sentence], found["waiting"]
    assert f"the event loop has been blocked for 5 s by generate hook blocks.py:generate at {run.folder}/{LINE}" in worker.text()


def test_a_prompt_that_blocks_ends_its_workers_and_is_dead_while_others_train_on(tmp_path: Path, task: Path) -> None:
    with blocking_run(tmp_path, task, lease_s=10) as run:
        run.start("broker")
        run.start("trainer")
        for name in ("w1", "w2"):
            worker = run.start("rollout", name=name)
            worker.expected.add(1)
            blocked(run, worker)
            assert worker.wait() == 1, worker.tail()
            found = run.wait_for("its groups queued again", lambda s: not clients(s, "rollout"))
            assert found["groups"]["leased"] == 0, "before their leases run out"
            assert "was blocked for 10 s by generate hook blocks.py:generate at" in worker.text()
            assert "a coroutine function must await what takes long" in worker.text()
            assert "time.sleep(1e6)" in worker.text(), "the stack"
        assert found["groups"]["dead"] == 1
        run.start("rollout", name="w3")
        run.complete(6)
        moves = run.final_status()["moves"]
        assert not [move for move in moves if "expired" in move], moves


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_blocked_worker_ends_when_it_is_told_to_and_its_groups_are_free_at_once(
    tmp_path: Path, task: Path, number: signal.Signals
) -> None:
    with blocking_run(tmp_path, task, lease_s=600) as run:
        _, trainer, worker = run.start_all()
        worker.expected.add(1)
        blocked(run, worker)
        family = worker.family()
        assert len(family) >= 2, "the worker has an engine below it"
        worker.send(number)
        assert worker.wait(LEAVE_S) == 1, worker.tail()
        found = run.wait_for("its groups queued again", lambda s: not clients(s, "rollout"), timeout_s=LEAVE_S)
        assert found["groups"]["leased"] == 0
        trainer.kill()
        run.assert_none_alive(within_s=LEAVE_S, others=1)

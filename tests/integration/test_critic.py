"""A critic as a process of its own beside the trainer: it learns, is killed, goes on where it was, and the policy waits for its values."""

import statistics
import time
from pathlib import Path

import pytest
from live_run import START_S, Run

pytestmark = pytest.mark.integration

BATCH, STEPS = 8, 45
REWARD = """
def reward(response):
    return float(next(letter for letter in response.prompt[-1]["content"] if letter.isdigit()) < "5")
"""


def rows_of(run: Run) -> list[dict]:
    return run.rows("critic")


def wait_for_rows(run: Run, count: int) -> None:
    deadline = time.monotonic() + START_S
    while len(rows_of(run)) < count:
        run.assert_healthy("steps of the critic")
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.timeout(400)
def test_a_critic_learns_the_returns_is_killed_and_goes_on_where_it_was(tmp_path: Path, task: Path) -> None:
    settings = {"critic_lr": 1e-3, "num_critic_only_steps": 5}
    changes = {
        "broker__required_fields": ["values"],
        "rollout__num_rollout": STEPS,
        "rollout__rollout_batch_size": BATCH,
        "rollout__max_running_groups": BATCH,
        "rollout__custom_rm_path": "reward.py:reward",
        "algorithm__advantage_estimator": "ppo",
        "algorithm__settings": settings,
        "trainer__keep_checkpoints": 100,  # so that no group is freed before the critic has read it again
    }
    with Run(tmp_path, task, **changes) as run:
        (tmp_path / "reward.py").write_text(REWARD)
        run.start("broker")
        run.start("trainer")
        critic = run.start("trainer", "--role", "critic", name="critic")
        run.start("rollout")
        wait_for_rows(run, 7)
        critic.kill()
        num_before = len(rows_of(run))
        run.start("trainer", "--role", "critic", name="critic")
        run.complete()

        run.assert_accounted(STEPS, BATCH)
        rows = rows_of(run)
        assert rows[num_before]["step"] < rows[num_before - 1]["step"] + 1, "it goes on from its checkpoint"
        survived = {row["step"]: row for row in rows}
        positions = [survived[step]["position"] for step in sorted(survived)]
        assert [late - early for early, late in zip([0, *positions], positions, strict=False)] == [BATCH] * len(positions)
        assert all(row["groups_skipped"] == 0 for row in rows)
        explained = [row["explained_variance"] for row in rows]
        assert statistics.median(explained[-8:]) > 0.5, explained
        trained = run.rows("trainer")
        assert all(row["grad_norm"] == 0 for row in trained if row["step"] < 5)
        assert all(row["grad_norm"] > 0 for row in trained if row["step"] >= 6)

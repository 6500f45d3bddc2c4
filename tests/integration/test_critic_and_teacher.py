"""Processes beside the trainer: a critic with values that the policy waits for, and a teacher that scores what the student samples."""

import json
import shutil
import signal
import statistics
import time
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from live_run import START_S, Run
from safetensors.numpy import load_file, save_file

from slimebus.view.report import page_url

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
        run.complete(STEPS, BATCH)
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


STEPS = 60


@pytest.fixture
def teacher(task: Path, tmp_path: Path) -> Path:
    """The student's model, but for ten tokens that it likes or dislikes more."""
    folder = tmp_path / "teacher"
    shutil.copytree(task / "model", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][5:15] *= 4
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_student_moves_to_the_teacher_that_scores_its_samples(tmp_path: Path, task: Path, teacher: Path) -> None:
    changes = {
        "broker__required_fields": ["teacher_logprobs"],
        "algorithm__advantage_estimator": "on_policy_distillation",
        "rollout__num_rollout": STEPS,
        "optimizer__lr": 2e-3,
        "optimizer__lr_decay_style": "linear",  # a step has few samples: at a rate that stays the distance goes up and down
        "trainer__save_interval": 0,
    }
    with Run(tmp_path, task, **changes) as run:
        for role in ("broker", "trainer", "rollout"):
            run.start(role)
        scorer = run.start("rollout", "--teacher", str(teacher), name="teacher")
        run.complete(STEPS)
        away = [row["opd_reverse_kl"] for row in run.rows("trainer")]
        assert np.mean(away[-10:]) < 0.5 * np.mean(away[:10]), away
        assert "scores with http://127.0.0.1" in scorer.text()


def test_a_teacher_refuses_what_its_engine_cannot_score_and_leaves_on_sigterm(tmp_path: Path, task: Path, teacher: Path) -> None:
    with Run(tmp_path, task, broker__required_fields=["teacher_logprobs"], broker__http="127.0.0.1:0") as run:
        run.start("broker")
        hot = run.start("rollout", "--teacher", str(teacher), "--rollout-temperature", "0.7", name="hot")
        hot.ends(2, 60)
        assert "rollout.rollout_temperature: 0.7, but engines score given tokens at temperature 1 only" in hot.text()

        tokenizer = json.loads((teacher / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        *_, last, end = sorted(vocab, key=vocab.get)
        vocab[last], vocab[end] = vocab[end], vocab[last]
        (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
        other = run.start("rollout", "--teacher", str(teacher), name="other")
        other.ends(2, 60)
        assert "the models must have the same tokenizer" in other.text()

        waiting = run.start("rollout", "--teacher", str(task / "model"), name="waiting")
        exported = 'slimebus_consumer_groups{process="waiting"} 0'
        metrics = page_url(run.run_dir).replace("/?", "/metrics?")
        run.wait_for("a heartbeat of the teacher", lambda _: exported in urlopen(metrics).read().decode())
        waiting.send(signal.SIGTERM)
        assert waiting.wait() == 0
        run.assert_none_alive(within_s=5.0, others=2)  # the broker and its page

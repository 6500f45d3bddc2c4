"""A teacher beside a run: its engine scores what the student samples, and the student moves to it."""

import json
import shutil
import signal
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from live_run import Run
from safetensors.numpy import load_file, save_file

from slimebus.view.report import page_url

pytestmark = pytest.mark.integration

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
        run.complete()
        run.assert_accounted(STEPS)
        away = [row["opd_reverse_kl"] for row in run.rows("trainer")]
        assert np.mean(away[-10:]) < 0.5 * np.mean(away[:10]), away
        assert "scores with http://127.0.0.1" in scorer.text()


def test_a_teacher_refuses_what_its_engine_cannot_score_and_leaves_on_sigterm(tmp_path: Path, task: Path, teacher: Path) -> None:
    with Run(tmp_path, task, broker__required_fields=["teacher_logprobs"], broker__http="127.0.0.1:0") as run:
        run.start("broker")
        hot = run.start("rollout", "--teacher", str(teacher), "--rollout-temperature", "0.7", name="hot")
        hot.expected.add(2)
        assert hot.wait(60) == 2
        assert "rollout.rollout_temperature: 0.7, but engines score given tokens at temperature 1 only" in hot.text()

        tokenizer = json.loads((teacher / "tokenizer.json").read_text())
        vocab = tokenizer["model"]["vocab"]
        *_, last, end = sorted(vocab, key=vocab.get)
        vocab[last], vocab[end] = vocab[end], vocab[last]
        (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
        other = run.start("rollout", "--teacher", str(teacher), name="other")
        other.expected.add(2)
        assert other.wait(60) == 2
        assert "the models must have the same tokenizer" in other.text()

        waiting = run.start("rollout", "--teacher", str(task / "model"), name="waiting")
        exported = 'slimebus_consumer_groups{process="waiting"} 0'
        metrics = page_url(run.run_dir).replace("/?", "/metrics?")
        run.wait_for("a heartbeat of the teacher", lambda _: exported in urlopen(metrics).read().decode())
        waiting.send(signal.SIGTERM)
        assert waiting.wait() == 0
        run.assert_none_alive(within_s=5.0, others=2)  # the broker and its page

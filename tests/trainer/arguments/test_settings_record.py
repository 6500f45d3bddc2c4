"""A resumed trainer tells what has changed."""

from pathlib import Path

import pytest

from trainer.arguments.agreement import FILE, note_settings


def test_each_changed_setting_is_one_line_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    first = {"algorithm.advantage_estimator": "grpo", "optimizer.lr": "0.001", "seed": "0"}
    note_settings(run, first, is_resumed=False)
    note_settings(run, first, is_resumed=True)
    assert not caplog.messages
    second = first | {"algorithm.advantage_estimator": "gspo", "megatron.weight_decay": "0.1"}
    note_settings(run, second, is_resumed=True)
    assert [message.partition("started: ")[2] for message in caplog.messages] == [
        "algorithm.advantage_estimator: grpo -> gspo",
        "megatron.weight_decay: unset -> 0.1",
    ]
    note_settings(run, first, is_resumed=False)
    assert len(caplog.messages) == 2


def test_a_damaged_record_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text("{")
    note_settings(tmp_path, {"seed": "0"}, is_resumed=True)
    note_settings(tmp_path, {"seed": "1"}, is_resumed=True)
    assert len(caplog.messages) == 1

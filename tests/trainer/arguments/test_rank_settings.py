"""What all ranks of a trainer must share, and what may differ."""

from pathlib import Path

import msgspec
import pytest

from slimebus.bus.errors import ConfigError
from slimebus.config.load import resolve
from trainer.arguments.rank_settings import FILE, check_agreement, note_settings, shared_settings


def said(base: Path | None = None, **flags: object) -> dict[str, str]:
    return shared_settings(resolve(None, {name.replace("__", "."): value for name, value in flags.items()}, {}).config, base)


def disagreements(*settings: dict[str, str]) -> list[str]:
    """The clauses of the error; none where there is none."""
    try:
        check_agreement(settings)
    except ConfigError as bad:
        *clauses, remedy = bad.text.split("; ")
        assert remedy == "start every rank with the same settings"
        return clauses
    return []


@pytest.mark.parametrize(
    ("name", "value", "differs"),
    [
        ("optimizer__lr", 1e-3, True),
        ("algorithm__advantage_estimator", "rloo", True),
        ("algorithm__settings.eps_clip", 0.3, True),
        ("trainer__tensor_model_parallel_size", 2, True),
        ("megatron__weight_decay", 0.1, True),
        ("rollout__num_steps_per_rollout", 2, True),
        ("rollout__num_passes_per_rollout", 2, True),
        ("seed", 1, True),
        ("run_dir", "/elsewhere", False),
        ("trainer__train_threads", 3, False),
        ("trainer__save_hf", "there", False),
        ("broker__bind", "tcp://127.0.0.1:1", False),
        ("weights__weights_bind", "tcp://127.0.0.1:1", False),
    ],
)
def test_what_must_agree(name: str, value: object, differs: bool) -> None:
    found = disagreements(said(), said(), said(**{name: value}))
    assert [text.split()[3] for text in found] == ([name.replace("__", ".")] if differs else [])


def test_the_message_names_field_values_and_ranks() -> None:
    a, b = said(optimizer__lr=1e-4), said(optimizer__lr=1e-3)
    assert disagreements(a, b) == ["rank 1 has optimizer.lr 0.001, rank 0 0.0001"]
    assert disagreements(a, b, b, a, b) == ["rank 1 (and 2 more) has optimizer.lr 0.001, rank 0 0.0001"]
    assert disagreements(a, said(optimizer__lr=1e-4, megatron__x=1)) == ["rank 1 has megatron.x 1, rank 0 unset"]


def test_paths_may_differ_and_what_lies_there_not(tmp_path: Path) -> None:
    for name, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(text)
        (tmp_path / name / "config.json").write_bytes(msgspec.json.encode({"num_hidden_layers": len(text), "vocab_size": ord(text[-1])}))
    config = resolve(None, {"algorithm.corrections": "own.py:Own"}, {}).config
    a, b, c = (shared_settings(config, tmp_path / name, tmp_path / name) for name in "abc")
    assert a == b
    assert [text.split()[3] for text in disagreements(a, c)] == ["algorithm.corrections", "model.hf_checkpoint"]


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

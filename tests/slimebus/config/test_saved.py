"""What changed since a run was last started: listed, and where samples rest on it refused until it is confirmed."""

from pathlib import Path
from typing import Any

import pytest

from slimebus.bus.errors import UsageError
from slimebus.config import Resolved, resolve
from slimebus.config.saved import note_changes, save_config


class StartedRun:
    """A run of one folder, which has trained a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "model").mkdir()
        (folder / "run" / "metrics").mkdir(parents=True)
        (folder / "run" / "metrics" / "broker.jsonl").write_text('{"step": 0}\n')
        for name, text in {"reward.py": "def reward(r): return 1.0", "keep.py": "def keep(s): return True", "held.jsonl": "{}"}.items():
            (folder / name).write_text(text)
        (folder / "model" / "config.json").write_text('{"vocab_size": 8}')
        (folder / "model" / "model.safetensors").write_bytes(b"weights")
        (folder / "run.yaml").write_text(
            "run_dir: run\nmodel: {hf_checkpoint: model}\ndata: {prompt_data: [held.jsonl]}\n"
            "rollout: {custom_rm_path: 'reward.py:reward', dynamic_sampling_filter_path: 'keep.py:keep'}\n"
            "eval: {datasets: {held: {path: held.jsonl}}}\n"
        )
        save_config(self.resolved())

    def resolved(self, **changes: Any) -> Resolved:
        return resolve(self.folder / "run.yaml", {"run_dir": str(self.folder / "run"), **changes}, {})

    def start(self, *, is_confirmed: bool = False, **changes: Any) -> None:
        note_changes(self.resolved(**changes), is_confirmed=is_confirmed)


@pytest.fixture
def run(tmp_path: Path) -> StartedRun:
    return StartedRun(tmp_path)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ("reward.py", "rollout.custom_rm_path: reward.py:reward (hash "),
        ("model/model.safetensors", "model.hf_checkpoint: hash "),
        ("model/config.json", "model.hf_checkpoint: hash "),
        ({"rollout.custom_rm_path": "held.py:reward"}, "rollout.custom_rm_path: reward.py:reward (hash "),
        ({"rollout.rm_type": "math"}, "rollout.rm_type: exact -> math"),
        ({"data.apply_chat_template": False}, "data.apply_chat_template: true -> false"),
    ],
)
def test_another_reward_or_model_is_refused_until_it_is_confirmed(
    run: StartedRun, changed: str | dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    flags = changed if isinstance(changed, dict) else {}
    if isinstance(changed, str):
        (run.folder / changed).write_text('{"vocab_size": 9}')
    with pytest.raises(UsageError, match="--accept-changes") as refused:
        run.start(**flags)
    assert name in refused.value.text
    run.start(is_confirmed=True, **flags)
    assert f"changed since the run was last started: {name}" in caplog.text


@pytest.mark.parametrize(("changed", "name"), [("keep.py", "rollout.dynamic_sampling_filter_path"), ("held.jsonl", "eval.datasets.held")])
def test_another_hook_or_evaluation_is_listed(run: StartedRun, changed: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / changed).write_text("def keep(samples): return False")
    run.start()
    assert f"changed since the run was last started: {name}: " in caplog.text


def test_a_run_that_goes_on_as_it_was_says_nothing(run: StartedRun, caplog: pytest.LogCaptureFixture) -> None:
    run.start(**{"rollout.num_rollout": 900, "broker.bind": "tcp://127.0.0.1:0", "rollout.reward_timeout_s": 5.0})
    assert not caplog.text


def test_a_run_that_was_started_elsewhere_is_named(
    run: StartedRun, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (run.folder / "run.yaml").write_text("name: mine\n")
    (run.folder / "else").mkdir()
    for folder, is_told in ((".", False), (".", False), ("else", True)):
        monkeypatch.chdir(run.folder / folder)
        resolved = resolve(run.folder / "run.yaml", {}, {})
        note_changes(resolved, is_confirmed=False)
        resolved.run_dir.mkdir(parents=True, exist_ok=True)
        assert (str(run.folder / "runs" / "mine") in caplog.text) is is_told
        if not is_told:
            save_config(resolved)


@pytest.mark.parametrize(("given", "expected"), [("run_dir: here/r", "yaml/here/r"), ("", "cwd/runs/run")])
def test_a_run_dir_of_the_file_is_relative_to_it(tmp_path: Path, given: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("yaml", "cwd"):
        (tmp_path / name).mkdir()
    (tmp_path / "yaml" / "run.yaml").write_text(given)
    monkeypatch.chdir(tmp_path / "cwd")
    assert resolve(tmp_path / "yaml" / "run.yaml", {}, {}).run_dir.resolve() == tmp_path / expected
    assert resolve(tmp_path / "yaml" / "run.yaml", {"run_dir": "there"}, {}).run_dir.resolve() == tmp_path / "cwd" / "there"


def test_before_the_first_step_everything_may_change(run: StartedRun, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "run" / "metrics" / "broker.jsonl").unlink()
    run.start(**{"rollout.rm_type": "math"})
    assert not caplog.text


def test_a_machine_without_the_files_compares_their_names(run: StartedRun, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "model" / "config.json").unlink()
    run.start()
    assert not caplog.text

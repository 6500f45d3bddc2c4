"""The parts of tests/bench/trl_baseline.py that need no TRL: what it refuses, what it rewards, what it reports."""

import subprocess
import sys
from pathlib import Path

import pytest
import trl_baseline as baseline


class Letters:
    """A tokenizer of five tokens: id 0 ends, ids 1 to 4 are `>`, `9`, `9` and `2`."""

    eos_token_id = 0
    text = "?>992"

    def decode(self, ids: list[int]) -> str:
        return "".join(self.text[i] for i in ids)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    (model / "config.json").write_text("{}")
    (data / "rl.jsonl").write_text("{}\n" * 64)
    (data / "heldout.jsonl").write_text("{}\n")
    return model, data


def run(model: Path, data: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, baseline.__file__, "--model", str(model), "--data", str(data), *options],
        capture_output=True,
        text=True,
        timeout=30,
    )


def test_missing_data_is_one_line_before_anything_is_installed(folders: tuple[Path, Path]) -> None:
    model, data = folders
    (data / "heldout.jsonl").unlink()
    ended = run(model, data)
    assert ended.returncode == 2
    assert "heldout.jsonl: no such file" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_more_steps_than_there_are_prompts_for_are_refused(folders: tuple[Path, Path]) -> None:
    ended = run(*folders, "--steps", "3")
    assert ended.returncode == 2
    assert "needs 96 prompts" in ended.stderr
    assert "has 64" in ended.stderr


def test_steps_must_be_positive(folders: tuple[Path, Path]) -> None:
    assert run(*folders, "--steps", "0").returncode == 2


def test_reward_needs_the_stop_token_and_the_exact_sum() -> None:
    score = baseline.recipe_reward(Letters())
    assert score([1, 2, 3, 4, 0], "992") == 1.0
    assert score([1, 2, 3, 4], "992") == 0.0
    assert score([1, 2, 3, 4, 0], "993") == 0.0
    assert score([], "992") == 0.0


def test_answers_are_cut_behind_the_first_stop_token() -> None:
    assert baseline.until_end([5, 6, 0, 0, 0], 0) == [5, 6, 0]
    assert baseline.until_end([5, 6], 0) == [5, 6]


def test_result_leaves_out_the_first_step_and_finds_when_the_goal_was_reached() -> None:
    line = baseline.result([9.0, 1.0, 3.0], [(0, 0.0, 0.4), (2, 10.0, 0.9), (3, 13.0, 0.95)])
    assert line["s_per_step"] == 2.0
    assert line["s_per_step_best"] == 1.0
    assert line["samples_per_s"] == 32 * 8 / 2.0
    assert line["steps"] == 3
    assert line["curve"] == [[0, 0.0, 0.4], [2, 10.0, 0.9], [3, 13.0, 0.95]]
    assert line["time_to_090_s"] == 10.0


def test_goal_never_reached_is_null() -> None:
    assert baseline.result([1.0], [(0, 0.0, 0.4)])["time_to_090_s"] is None

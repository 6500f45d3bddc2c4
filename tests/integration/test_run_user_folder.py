"""Commands are started in a user's folder, with files that may be called like modules of ours or of a library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_run import MARK, Run

pytestmark = pytest.mark.integration

NAMES = ("trainer", "click", "yaml", "torch", "zmq", "msgspec", "numpy", "logging")
PACKAGES = ("broker", "rollout", "megatron", "transformers")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder in which every import from it fails."""
    folder = tmp_path / "mine"
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
    for file in [*(folder / f"{name}.py" for name in NAMES), *(folder / name / "__init__.py" for name in PACKAGES)]:
        file.write_text("raise RuntimeError('imported from the working directory')\n")
    return folder


def slimebus(folder: Path, *words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "slimebus", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=os.environ | environment)


def test_a_whole_run_works_in_a_folder_with_files_called_like_modules(hostile: Path, tmp_path: Path, task: Path) -> None:
    with Run(tmp_path / "run", task, rollout__num_rollout=2) as run:
        done = slimebus(hostile, "up", str(run.file), **{MARK: run.mark})
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "working directory" not in done.stdout + done.stderr


@pytest.mark.parametrize("words", [["trainer", "--nproc-per-node", "2"], ["export", "--out", "x", "--nproc-per-node", "2"]])
def test_the_ranks_of_a_trainer_do_not_import_from_there(hostile: Path, tmp_path: Path, task: Path, words: list[str]) -> None:
    with Run(tmp_path / "run", task, broker__connect_timeout_s=1) as run:
        done = slimebus(hostile, words[0], str(run.file), *words[1:], **{MARK: run.mark})
    assert "working directory" not in done.stdout + done.stderr
    assert "no broker answered" in done.stderr or "no checkpoint" in done.stderr, done.stderr[-2000:]


@pytest.mark.parametrize("command", ["broker", "trainer", "rollout", "up", "buffer", "weights", "config"])
def test_no_help_imports_from_there(hostile: Path, command: str) -> None:
    done = slimebus(hostile, command, "--help")
    assert done.returncode == 0, done.stderr

"""The status of a run whose broker has ended is at hand."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import SlimebusError
from slimebus.cli.commands import status
from slimebus.cli.commands.status import EXIT_UNREACHABLE, summary
from slimebus.cli.root import exit_code, root


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: other\nbroker: {bind: 'tcp://127.0.0.1:1'}\n")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


def write(run_dir: Path, state: str) -> None:
    (run_dir / "status.json").write_text(json.dumps({"run": "mine", "state": state, "step": 6}))


def test_a_run_that_is_over_says_so_at_once_from_its_file(run_dir: Path) -> None:
    write(run_dir, "finished")
    started = time.monotonic()
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert time.monotonic() - started < 2
    assert done.exit_code == 0
    assert done.output.startswith("the run is over. Its last status (runs/mine/status.json):")
    assert "run mine: finished, step 6 of ?" in done.output
    as_json = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--json"])
    assert json.loads(as_json.output)["step"] == 6


def test_a_run_that_was_stopped_can_go_on(run_dir: Path) -> None:
    write(run_dir, "running")
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert done.exit_code == EXIT_UNREACHABLE
    assert "no broker runs; started again with the same run directory it goes on" in done.output


def test_a_file_of_an_earlier_broker_does_not_hide_one_that_listens(run_dir: Path) -> None:
    write(run_dir, "finished")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = ["status", "run.yaml", "--name", "mine", "--bind", f"tcp://127.0.0.1:{listening.getsockname()[1]}", "--timeout-s", "0.5"]
        assert CliRunner().invoke(root, words).exit_code == EXIT_UNREACHABLE


def test_an_address_that_is_given_is_asked_whatever_the_file_says(run_dir: Path) -> None:
    write(run_dir, "finished")
    words = ["status", "run.yaml", "--name", "mine", "--broker", "tcp://127.0.0.1:1", "--timeout-s", "0.3"]
    done = CliRunner().invoke(root, words)
    assert done.exit_code == EXIT_UNREACHABLE
    assert "the run is over" not in done.output


WHOLE = {
    "run": "mine",
    "lineage": "",
    "version": -1,
    "step": 3,
    "oldest_checkpoint": 2,
    "num_steps": 8,
    "state": "running",
    "groups": {"queued": 4, "leased": 0, "committed_bytes": 1_572_864},
    "moves": {},
    "clients": [{"name": "w1", "role": "rollout", "state": "starting: its engine", "version": None, "metrics": {"tokens": 3.0}}],
    "steps": [{"step": 2, "metrics": {"reward": 0.25, "loss": 0.1}}],
    "waste": {"stale": {"groups": 3, "tokens": 9}},
    "waiting": ["trainer waits for batch 3"],
    "stalled": None,
    "security": {"transport": "plain", "problem": ""},
}


def test_the_text_begins_with_what_the_run_does_and_who_waits() -> None:
    assert summary(WHOLE) == [
        "run mine: running, step 3 of 8",
        "waiting           trainer waits for batch 3",
        "clients:",
        "  name  role     state                 version",
        "  w1    rollout  starting: its engine  -",
        "groups            queued 4  leased 0  committed 1.5 MiB",
        "steps:",
        "  step  reward  loss",
        "  2     0.25    0.1",
        "waste:",
        "  name   groups  tokens",
        "  stale  3       9",
        "oldest checkpoint 2",
        "security          transport plain",
    ]


def test_a_stalled_run_says_so_first() -> None:
    stalled = {"since_s": 40.0, "limit_s": 30.0, "reason": "trainer t has been silent for 41 s"}
    assert summary({**WHOLE, "stalled": stalled})[0] == "stalled for 40 s (limit 30 s): trainer t has been silent for 41 s"


def test_a_broker_of_another_run_does_not_stand_for_the_one_that_is_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def visit(*given: Any, **how: Any) -> Iterator[None]:
        raise SlimebusError("this broker serves run 'theirs'", code="wrong_run")
        yield

    monkeypatch.setattr(status, "visit", visit)
    monkeypatch.setattr(status, "is_listening", lambda address: True)
    write(run_dir, "finished")
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert (done.exit_code, "serves run 'theirs'" in done.output) == (0, True)
    assert "the run is over. Its last status (runs/mine/status.json):" in done.output
    (run_dir / "status.json").unlink()
    refused = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert isinstance(refused.exception, SlimebusError)
    assert exit_code(refused.exception) == 2

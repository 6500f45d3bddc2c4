"""The status of a run whose broker has ended is at hand."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from made_status import WHOLE

from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.cli.commands import status
from slimebus.cli.commands.status import EXIT_UNREACHABLE, brief
from slimebus.cli.root import exit_code, root


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("name: other\nbroker: {bind: 'tcp://127.0.0.1:1'}\n")
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    return folder


def write(run_dir: Path, state: str) -> None:
    (run_dir / "status.json").write_text(json.dumps({**WHOLE, "state": state, "step": 6}))


def test_a_run_that_is_over_says_so_at_once_from_its_file(run_dir: Path) -> None:
    write(run_dir, "finished")
    started = time.monotonic()
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert time.monotonic() - started < 2
    assert done.exit_code == 0
    assert done.output.startswith("the run is over. Its last status (runs/mine/status.json):")
    assert "run mine: finished, step 6 of 8" in done.output
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


def test_a_run_that_ends_between_two_looks_is_over_and_not_unreachable(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([{**WHOLE, "state": "running"}])

    def ask(client: None, timeout_s: float) -> dict[str, Any]:
        for found in seen:
            return found
        write(run_dir, "finished")
        raise Unreachable("77 s of silence")

    monkeypatch.setattr(status, "PLAIN_EVERY_S", 0.0)
    monkeypatch.setattr(status, "ask_status", ask)
    monkeypatch.setattr(status, "visit", lambda *given, **how: nullcontext())
    monkeypatch.setattr(status, "is_listening", lambda address: True)
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--watch"])
    assert (done.exit_code, "the run is over" in done.output, "77 s" in done.output) == (0, True, False)


def test_an_address_that_is_given_is_asked_whatever_the_file_says(run_dir: Path) -> None:
    write(run_dir, "finished")
    words = ["status", "run.yaml", "--name", "mine", "--broker", "tcp://127.0.0.1:1", "--timeout-s", "0.3"]
    done = CliRunner().invoke(root, words)
    assert done.exit_code == EXIT_UNREACHABLE
    assert "the run is over" not in done.output


def test_a_person_sees_the_run_its_workers_and_who_waits_at_a_glance() -> None:
    assert brief(WHOLE) == [
        "run mine: running, step 3 of 8, version 3",
        "  step       3/8  4 s, 8 s left",
        "  reward     0.250",
        "  held-out   0.500 (0.500 before)",
        "  lag        mean 1.50, largest 2, bound 2",
        "  tokens/s   trainer 0, 2 workers 1.2 k",
        "  groups     4 queued, 0 leased, 1 ready, 0 assigned",
        "  waste      3 groups stale (9 tokens)",
        "  failed     7 of 90 samples had no reward; the logs of workers say why",
        "  dead       2 groups (slimebus buffer ls --state dead)",
        "  name  state                 lag  groups  tokens/s  last heard",
        "  w1    starting: its engine  -    0       -         0 s ago",
        "  w2    serving               1    8       1.2 k     1 s ago",
        "  trainer waits for batch 3",
    ]


def test_of_a_thousand_workers_a_dozen_are_named_and_the_others_counted() -> None:
    crowd = [{**WHOLE["clients"][1], "name": f"w{i}"} for i in range(1000)]
    lines = brief({**WHOLE, "clients": crowd})
    assert len(lines) < 30
    assert "  and 988 more workers (--json)" in lines


def test_a_stalled_run_says_so_first() -> None:
    stalled = {**WHOLE, "stalled": {"since_s": 40.0, "limit_s": 30.0, "reason": "trainer t has been silent for 41 s"}}
    first = "stalled for 40 s (limit 30 s): trainer t has been silent for 41 s"
    assert brief(stalled)[0] == first


def test_a_last_evaluation_that_ended_early_is_told_with_its_reason() -> None:
    (row,) = WHOLE["evaluations"]
    ended = {**WHOLE, "evaluations": [{**row, "version": 12, "reason": "no worker is left to evaluate"}]}
    assert "  evaluation of version 12 ended early: no worker is left to evaluate" in brief(ended)
    assert not any("ended early" in line for line in brief(WHOLE))


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


def test_a_status_file_of_something_else_is_no_status(run_dir: Path) -> None:
    (run_dir / "status.json").write_text('{"state": "finished", "result": 1}')
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--timeout-s", "0.2"])
    assert (done.exit_code, "no answer from the broker" in done.output) == (EXIT_UNREACHABLE, True)

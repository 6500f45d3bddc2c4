"""A mistake on the command line is one line and exit code 2; nobody waits for a broker that is not there."""

import sys
import time
from pathlib import Path

import pytest

from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.cli.commands import evaluate
from slimebus.cli.root import main
from slimebus.client import connect
from slimebus.config import resolve


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    """The exit code of `slimebus WORDS`."""
    monkeypatch.setattr(sys, "argv", ["slimebus", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["set", "--timeout-s", "soon"], "slimebus: Invalid value for '--timeout-s': 'soon' is not a valid float. (`slimebus set --help`)"),
        (["buffer", "ls", "--state", "lost"], "(`slimebus buffer ls --help`)"),
        (["weights", "verify", "/no/such/folder"], "Path '/no/such/folder' does not exist. (`slimebus weights verify --help`)"),
        (["nope"], "slimebus: No such command 'nope'."),
        (["status", "--no-such-option"], "slimebus: No such option"),
    ],
)
def test_a_usage_error_is_one_line(
    words: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_a_run_directory_in_the_place_of_a_run_yaml_is_said_with_the_option_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "status", str(tmp_path)) == 2
    assert f"{tmp_path}: a folder; expected a YAML file (a run's directory is given as --run-dir {tmp_path})" in capsys.readouterr().err


def test_eval_without_a_broker_says_how_a_model_is_evaluated_without_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluate, "RESTART_S", 0.0)
    assert run(monkeypatch, "eval", "--broker", "tcp://127.0.0.1:1") == 1
    assert "without a run: --model DIR" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["eval"], ["set"], ["set", "max-staleness", "2"]])
def test_a_broker_that_has_ended_is_not_waited_for(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert run(monkeypatch, *words, "--broker", "tcp://127.0.0.1:1") == 1
    assert time.monotonic() - started < connect.RESTART_S + 2
    assert "no broker listens at tcp://127.0.0.1:1" in capsys.readouterr().err


def test_a_broker_that_is_started_again_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(connect, "is_listening", lambda address: next(answers))
    monkeypatch.setattr(connect, "LISTEN_POLL_S", 0.0)
    connect.check_listening("tcp://127.0.0.1:1", 10.0)
    assert list(answers) == []


@pytest.mark.parametrize("code", ["forbidden", "no_dataset"])
def test_a_key_or_name_that_the_broker_refuses_is_a_mistake(code: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("broker: {bind: 'tcp://127.0.0.1:1'}\n")
    with pytest.raises(UsageError) as refused, connect.connect_without_joining(resolve(file, {}, {}), None, what="test"):
        raise SlimebusError("broker: no", code=code)
    assert refused.value.code == code

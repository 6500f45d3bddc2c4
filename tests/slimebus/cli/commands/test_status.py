"""The status of a run whose broker has ended is at hand."""

import fcntl
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
from slimebus.cli.commands.status import EXIT_UNREACHABLE
from slimebus.cli.root import exit_code, root
from slimebus.client import connect
from slimebus.config import resolve
from slimebus.view import run_status
from slimebus.view.terminal import brief


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
    assert done.output.startswith("the run is over. Its last status, 0 s old:\n")
    assert "run mine: finished, step 6 of 8" in done.output
    as_json = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--json"])
    assert json.loads(as_json.output)["step"] == 6


MINE, AT = ["run.yaml", "--name", "mine"], ["--broker", "tcp://127.0.0.1:1", "--timeout-s", "0.3"]
NOT_THERE = "no broker listens at tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("state", "words", "code", "said", "told"),
    [
        (
            "running",
            MINE,
            EXIT_UNREACHABLE,
            "no broker runs; restart it with the same run directory to resume the run. Its last status",
            "",
        ),
        ("finished", [*MINE, *AT], 0, "the run is over. Its last status", NOT_THERE),
        ("finished", ["--run-dir", "runs/mine", *AT], EXIT_UNREACHABLE, "", NOT_THERE),  # the run at an address may be another
        ("finished", ["--name", "theirs", "--run-dir", "runs/mine", *AT], EXIT_UNREACHABLE, "", NOT_THERE),
        ("", [*MINE, "--timeout-s", "0.2"], EXIT_UNREACHABLE, "", NOT_THERE),  # a file of something else
    ],
)
def test_the_file_of_a_broker_that_ended_stands_for_the_run_that_was_named(
    run_dir: Path, state: str, words: list[str], code: int, said: str, told: str
) -> None:
    write(run_dir, state)
    if not state:
        (run_dir / "status.json").write_text('{"state": "finished", "result": 1}')
    done = CliRunner().invoke(root, ["status", *words])
    assert (done.exit_code, done.stdout.startswith(said), bool(done.stdout)) == (code, True, bool(said))
    assert told in done.stderr


def test_a_file_of_an_earlier_broker_does_not_stand_for_one_that_listens(run_dir: Path) -> None:
    write(run_dir, "finished")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        words = ["status", "run.yaml", "--name", "mine", "--bind", f"tcp://127.0.0.1:{listening.getsockname()[1]}", "--timeout-s", "0.5"]
        assert CliRunner().invoke(root, words).exit_code == EXIT_UNREACHABLE


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the broker says at each look: a status, or an error; the last one again and again."""
    said: list[Any] = []

    def ask(client: None, timeout_s: float) -> dict[str, Any]:
        found = said.pop(0) if len(said) > 1 else said[0]
        found = found() if callable(found) else found
        if isinstance(found, Exception):
            raise found
        return dict(found)

    monkeypatch.setattr(status, "PLAIN_POLL_S", 0.0)
    monkeypatch.setattr(run_status, "ask_status", ask)
    monkeypatch.setattr(run_status, "connect_without_joining", lambda *given, **how: nullcontext("a client"))
    return said


def test_a_run_that_ends_between_two_looks_is_over_and_not_unreachable(run_dir: Path, answers: list[Any]) -> None:
    answers += [{**WHOLE, "state": "running"}, lambda: write(run_dir, "finished") or Unreachable("77 s of silence")]
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--watch"])
    assert (done.exit_code, "the run is over" in done.output, "77 s" in done.output) == (0, True, False)


def test_a_watched_run_whose_broker_is_away_is_shown_again_once_it_answers(run_dir: Path, answers: list[Any]) -> None:
    answers += [WHOLE, Unreachable("no broker listens at tcp://[x]:1"), {**WHOLE, "step": 4}, {**WHOLE, "step": 8, "state": "finished"}]
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--watch"])
    first, second, third, *last = done.output.splitlines()
    assert first.startswith("mine running | step 3/8")
    assert second == "mine: no answer for 0 s: no broker listens at tcp://[x]:1"
    assert third.startswith("mine running | step 4/8")
    assert (done.exit_code, last[0]) == (0, "run mine: finished, step 8 of 8, version 3")


def test_a_watched_broker_that_stays_away_is_given_up(run_dir: Path, answers: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    answers += [WHOLE, Unreachable("no broker listens at tcp://x:1")]
    monkeypatch.setattr(status, "PATIENCE_S", 0.05)
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--watch"])
    assert (done.exit_code, "step       3/8" in done.output) == (EXIT_UNREACHABLE, True)
    assert "no broker runs; restart it with the same run directory to resume the run. Its last status" in done.output


def test_a_viewer_whose_key_was_revoked_stops_watching(run_dir: Path, answers: list[Any]) -> None:
    answers += [WHOLE, SlimebusError("this key may not ask", code="forbidden")]
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine", "--watch"])
    assert isinstance(done.exception, SlimebusError)
    assert done.exception.text == "this key may not ask"


def test_the_file_of_an_earlier_start_of_the_run_does_not_replace_what_is_known(run_dir: Path, answers: list[Any]) -> None:
    write(run_dir, "finished")  # at step 6
    answers += [{**WHOLE, "step": 7}, Unreachable("silence"), {**WHOLE, "step": 9}, {**WHOLE, "lineage": "another"}, Unreachable("silence")]
    run = run_status.RunStatus(resolve(Path("run.yaml"), {"name": "mine"}), None, what="test", timeout_s=1.0)
    for step in (7, 7, 9, 3, 3):
        run.poll()
        assert (run.status["step"], run.is_over) == (step, False)


# --- where the broker is ---


@contextmanager
def working_broker(run_dir: Path, endpoint: str) -> Iterator[None]:
    """The lock of a broker that works in this run directory, held by another process as far as flock can tell."""
    (run_dir / "broker").mkdir()
    with (run_dir / "broker" / "owner.lock").open("w") as lock:
        lock.write(json.dumps({"pid": 1, "endpoint": endpoint}))
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("words", [["status"], ["set"], ["eval"], ["drain", "w1"], ["engines", "ls"]])
def test_a_broker_on_any_free_port_is_found_through_its_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    Path("run.yaml").write_text("name: mine\nbroker: {bind: 'tcp://127.0.0.1:0'}\n")
    asked: list[str] = []

    def check_listening(address: str, wait_s: float) -> None:
        asked.append(address)
        raise Unreachable("seen")

    monkeypatch.setattr(connect, "check_listening", check_listening)
    with working_broker(run_dir, "tcp://0.0.0.0:4711"):
        done = CliRunner().invoke(root, [*words, "run.yaml"])
    assert asked == ["tcp://127.0.0.1:4711"], done.output


def test_without_a_broker_a_port_0_is_no_address_and_the_missing_run_is_named(run_dir: Path) -> None:
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "never", "--bind", "tcp://127.0.0.1:0"])
    assert done.exit_code == EXIT_UNREACHABLE
    assert done.stderr == (
        "slimebus: no broker works in runs/never, and broker.bind tcp://127.0.0.1:0 names no port; start it, or give its --broker; "
        "there is no run at runs/never either\n"
    )


def test_what_a_broker_that_ended_announced_is_no_address(run_dir: Path) -> None:
    with working_broker(run_dir, "tcp://127.0.0.1:4711"):
        assert connect.live_endpoint(run_dir) == "tcp://127.0.0.1:4711"
    assert connect.live_endpoint(run_dir) == connect.live_endpoint(run_dir / "nothing") == ""


def test_a_person_sees_the_run_its_processes_and_who_waits_at_a_glance() -> None:
    assert brief(WHOLE, is_supervised=False) == [
        "run mine: running, step 3 of 8, version 3",
        "  step       3/8  4 s, 8 s left",
        "  reward     0.250",
        "  learning   loss 0.1",
        "  held-out   0.500 (0.500 before)",
        "  lag        mean 1.50, largest 2, bound 2",
        "  tokens/s   trainer 0, 2 workers 1.2 k",
        "  groups     4 queued, 0 leased, 1 ready, 0 assigned",
        "  waste      3 groups stale (9 tokens)",
        "  failed     7 of 90 samples had no reward; the logs of workers say why",
        "  dead       2 groups (slimebus buffer ls --state dead)",
        "",
        "  process  role     state                 lag  groups  tokens/s  last heard",
        "  t        trainer  training              -    0       -         0 s ago",
        "  w1       rollout  starting: its engine  -    0       -         0 s ago",
        "  w2       rollout  serving               1    8       1.2 k     1 s ago",
        "",
        "  step  reward  loss  lag_mean  lag_max",
        "  2     0.25    0.1   1.5       2",
        "",
        "  dataset  version  mean_reward  low  high  num_samples  num_failed",
        "  held     0        0.5          0.4  0.6   90           0",
        "",
        "  trainer waits for batch 3",
    ]


def test_of_a_thousand_workers_a_dozen_are_named_and_the_others_counted() -> None:
    crowd = [{**WHOLE["clients"][1], "name": f"w{i}"} for i in range(1000)]
    lines = brief({**WHOLE, "clients": crowd}, is_supervised=False)
    assert len(lines) < 36
    assert "  and 988 more (--json)" in lines


def test_a_stalled_run_says_so_first() -> None:
    stalled = {**WHOLE, "stalled": {"since_s": 40.0, "limit_s": 30.0, "reason": "trainer t has been silent for 41 s"}}
    first = "stalled for 40 s (limit 30 s): trainer t has been silent for 41 s"
    assert brief(stalled, is_supervised=False)[0] == first


def test_a_last_evaluation_that_ended_early_is_told_with_its_reason() -> None:
    (row,) = WHOLE["evaluations"]
    ended = {**WHOLE, "evaluations": [{**row, "version": 12, "reason": "no worker is left to evaluate"}]}
    assert "  evaluation of version 12 ended early: no worker is left to evaluate" in brief(ended, is_supervised=False)
    assert not any("ended early" in line for line in brief(WHOLE, is_supervised=False))


def test_a_broker_of_another_run_does_not_stand_for_the_one_that_is_over(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def visit(*given: Any, **how: Any) -> Iterator[None]:
        raise SlimebusError("this broker serves run 'theirs'", code="wrong_run")
        yield

    monkeypatch.setattr(run_status, "connect_without_joining", visit)
    write(run_dir, "finished")
    done = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert (done.exit_code, "serves run 'theirs'" in done.output) == (0, True)
    assert "the run is over. Its last status" in done.output
    (run_dir / "status.json").unlink()
    refused = CliRunner().invoke(root, ["status", "run.yaml", "--name", "mine"])
    assert isinstance(refused.exception, SlimebusError)
    assert exit_code(refused.exception) == 2

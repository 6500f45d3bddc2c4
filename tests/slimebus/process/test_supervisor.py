"""Who left a run too early or was killed, and is restarted."""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slimebus.bus.errors import UsageError
from slimebus.config import resolve
from slimebus.process import supervisor
from slimebus.process.launch import ChildProcess, ProcessGroup, locked
from slimebus.process.supervisor import (
    BROKER_EXIT_GRACE_S,
    EXIT_GRACE_S,
    MAX_RESTARTS,
    UP_LOCK,
    Supervisor,
    find_left_too_early,
    start_processes,
)

HERE = ("broker", "trainer", "rollout", "rollout-2")


def children(**gone_s: float) -> list[Any]:
    """Processes of a run; those named ended so many seconds ago."""
    now = time.monotonic()
    return [SimpleNamespace(name=role, ended_at=now - gone_s[key] if (key := role.replace("-", "_")) in gone_s else 0.0) for role in HERE]


def status(state: str = "running", **clients: str) -> dict[str, Any]:
    return {"state": state, "clients": [{"role": role, "state": is_in} for role, is_in in clients.items()]}


LONG = EXIT_GRACE_S + 1


@pytest.mark.parametrize(
    ("gone", "told", "again"),
    [
        ({"rollout": LONG, "rollout_2": LONG}, status(trainer="training"), "rollout"),
        ({"trainer": LONG}, status("waiting for a trainer", rollout="serving"), "trainer"),
        ({"trainer": LONG}, status(rollout="serving"), "trainer"),
        ({"broker": BROKER_EXIT_GRACE_S + 1}, None, "broker"),
        ({"rollout": LONG}, status(trainer="training"), ""),  # another worker of ours still works
        ({"rollout": LONG, "rollout_2": LONG}, status(rollout="serving"), ""),  # one of another machine does
        ({"rollout": LONG, "rollout_2": LONG}, status("finished"), ""),
        ({"trainer": LONG}, status("evaluating", rollout="serving"), ""),  # it has served the last version for as long as it does
        ({"rollout": 1.0, "rollout_2": 1.0}, status(), ""),  # the others may be on their way out, too
        ({"rollout": LONG, "rollout_2": LONG}, None, ""),  # the broker does not say what the run does
        ({"broker": LONG}, None, ""),
        ({"broker": 2 * BROKER_EXIT_GRACE_S, "trainer": LONG, "rollout": LONG, "rollout_2": LONG}, None, ""),
    ],
)
def test_one_that_left_too_early_is_started_again_and_one_who_is_not_needed_stays_away(
    gone: dict[str, float], told: dict[str, Any] | None, again: str
) -> None:
    found = find_left_too_early(children(**gone), told)
    assert (found.name if found else "") == again


def test_what_a_signal_ended_is_started_again_so_often_and_what_failed_is_not(tmp_path: Path) -> None:
    run = Supervisor(resolve(None, {}), [], quiet=True)
    with ProcessGroup(tmp_path) as group:
        failed = group.start("trainer", ["no-such-command"])
        group.start("broker", ["keys"])
        failed.process.wait(20)
        for _ in range(MAX_RESTARTS + 1):
            killed = group.children[1]
            os.kill(killed.process.pid, signal.SIGKILL)
            killed.process.wait(20)
            run.restart_killed(group)
        assert group.children == [failed, killed], "it was not started a fourth time, and the trainer not at all"


def test_another_process_takes_the_place_of_one_that_ended_and_the_first_stays_first(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path) as group:
        for role in ("broker", "trainer"):
            group.start(role, ["--version"]).process.wait(20)
        first, second = group.children
        group.restart(first)
        assert [child.name for child in group.children] == ["broker", "trainer"]
        assert group.children[0] is not first
        assert group.children[1] is second


def test_an_empty_line_of_a_process_is_not_shown(tmp_path: Path) -> None:
    lines: list[str] = []
    with ProcessGroup(tmp_path, sink=lambda role, line: lines.append(line)) as group:
        child = group.start("help", ["--help"])
        child.process.wait(20)
        child.finish()
    assert lines
    assert all(line.strip() for line in lines)


def test_a_trainer_that_still_saves_when_up_is_stopped_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By trainer.stop_grace_s: longer than a process that ends at once would be given."""
    saved = tmp_path / "saved"
    code = f"import signal, time, os\nsignal.signal(15, lambda *_: (time.sleep(3.5), open({str(saved)!r}, 'w'), os._exit(0)))\n"
    code += "os.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"

    def start(group: ProcessGroup, *given: object) -> str:
        for name, words in {"broker": ["sleep", "60"], "trainer": [sys.executable, "-S", "-c", code]}.items():
            group.children.append(ChildProcess(words, name=name, log=tmp_path / name, on_parent_end=signal.SIGTERM))
        return ""

    monkeypatch.setattr(supervisor, "start_processes", start)
    run = Supervisor(resolve(None, {"run_dir": str(tmp_path / "run")}), [], quiet=True)
    monkeypatch.setattr(run, "_connect", lambda *given: None)
    assert run.run() == 143
    assert saved.exists()


def test_nothing_is_started_beside_a_broker_that_has_the_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ProcessGroup(tmp_path) as group:
        resolved = resolve(None, {"broker.bind": f"tcp://127.0.0.1:{other.getsockname()[1]}"})
        with pytest.raises(UsageError, match="in use by another process"):
            start_processes(group, resolved, [], 1, {})
        assert not group.children


def test_of_two_ups_at_once_one_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has a broker yet that the other could find."""
    monkeypatch.setattr(supervisor, "LEAVE_S", 0.3)
    second = Supervisor(resolve(None, {"run_dir": str(tmp_path)}), [], quiet=True)
    with locked(tmp_path / UP_LOCK, 0.0) as is_first:
        assert is_first
        with pytest.raises(UsageError, match=r"is running: its `slimebus up` has the folder open"):
            second.run()
    assert [file.name for file in tmp_path.iterdir()] == [UP_LOCK]
    monkeypatch.setattr(second, "_run_processes", lambda: 0)
    assert second.run() == 0, "a lock ends with its owner"

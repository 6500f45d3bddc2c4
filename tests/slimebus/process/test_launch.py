import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from waiting import has_ended, wait_until

from slimebus.process import launch
from slimebus.process.launch import ChildProcess, ProcessGroup, free_port


def test_children_are_relayed_logged_and_ended(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    with ProcessGroup(tmp_path, sink=lambda role, line: lines.append((role, line))) as group:
        ended = group.start("init", ["init", str(tmp_path / "a.yaml")])
        waiting = group.start("status", ["status", "--broker", "tcp://127.0.0.1:9", "--timeout-s", "60"])
        ended.process.wait(20)
        assert ended.process.returncode == 0
        pid = waiting.process.pid
    assert has_ended(pid)
    assert "written" in ended.log_file.read_text()
    assert any(role == "init" and "written" in line for role, line in lines)


def test_children_are_shown_when_their_log_is_on_a_full_disk(tmp_path: Path) -> None:
    lines = []
    with small_disk(tmp_path / "logs", 1) as disk:
        fill(disk)
        with ProcessGroup(disk, sink=lambda role, line: lines.append(line)) as group:
            child = group.start("helper", ["--help"])
            child.process.wait(30)
            child.finish()
    assert child.process.returncode == 0
    assert len(lines) > 20


def test_a_child_that_a_hung_disk_keeps_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    child, waits = ChildProcess(["sleep", "60"], on_parent_end=signal.SIGKILL), list[float | None]()

    def hang(timeout: float | None = None) -> int:
        waits.append(timeout)
        raise subprocess.TimeoutExpired("sleep", timeout or 0.0)

    with monkeypatch.context() as patch:
        patch.setattr(child.process, "wait", hang)
        child.kill(0.5)
    assert waits == [0.5]
    assert child.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize("on_parent_end", [None, signal.SIGTERM])
def test_a_stopped_child_leaves_nothing_of_its_session(tmp_path: Path, on_parent_end: signal.Signals | None) -> None:
    log = tmp_path / "log"
    words = ["sh", "-c", "trap '' TERM; sleep 61 & echo $!; wait; wait"]
    child = ChildProcess(words, log=log, on_parent_end=on_parent_end)
    wait_until("the grandchild", lambda: log.read_text().strip(), 20)
    child.stop(0.2 if on_parent_end else 30.0)
    wait_until("its end", lambda: has_ended(int(log.read_text())), 10)


def test_children_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from slimebus.process.launch import ProcessGroup\n"
        "f = ProcessGroup(Path(sys.argv[1])); c = f.start('s', ['status', '--broker', 'tcp://127.0.0.1:9', '--timeout-s', '60'])\n"
        "print(c.process.pid, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=os.environ)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    time.sleep(0.3)
    launcher.kill()
    launcher.wait(5)
    launcher.stdout.close()
    wait_until("end of the child", lambda: has_ended(pid), 10)


def test_a_free_port_is_none_that_others_get_by_chance() -> None:
    first_by_chance = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(port < first_by_chance for port in (free_port() for _ in range(100)))


def test_a_free_port_is_free_at_any_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's store listens at all of them."""
    taken, draws = free_port(), itertools.count()
    with socket.create_server(("127.0.0.2", taken)):
        monkeypatch.setattr(launch, "PORTS", range(taken, taken + 100))
        monkeypatch.setattr(launch.secrets, "randbelow", lambda length: next(draws))
        assert free_port() > taken

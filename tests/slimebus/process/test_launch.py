import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_disk import fill, small_disk
from waiting import has_ended, wait_until

from slimebus.process import launch
from slimebus.process.launch import Fleet, free_port


def test_children_are_relayed_logged_and_ended(tmp_path: Path) -> None:
    lines: list[tuple[str, str]] = []
    with Fleet(tmp_path, sink=lambda role, line: lines.append((role, line))) as fleet:
        ended = fleet.start("init", ["init", str(tmp_path / "a.yaml")])
        waiting = fleet.start("status", ["status", "--broker", "tcp://127.0.0.1:9", "--timeout-s", "60"])
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
        with Fleet(disk, sink=lambda role, line: lines.append(line)) as fleet:
            child = fleet.start("helper", ["--help"])
            child.process.wait(30)
            child.finish()
    assert child.process.returncode == 0
    assert len(lines) > 20


def test_children_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from slimebus.process.launch import Fleet\n"
        "f = Fleet(Path(sys.argv[1])); c = f.start('s', ['status', '--broker', 'tcp://127.0.0.1:9', '--timeout-s', '60'])\n"
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

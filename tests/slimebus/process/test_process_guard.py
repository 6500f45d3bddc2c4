"""The guard ends all of a command, whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import has_ended, wait_until

import slimebus.process.process_guard
from rollout.engines.sglang.process import describe_exit_status
from slimebus.process.process_guard import can_hide

pytestmark = pytest.mark.integration

GUARD = str(Path(slimebus.process.process_guard.__file__))
# A server with a child of its own that ignores SIGTERM; both say that they run.
SERVER = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
print(process.pid, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(7)
"""
# Starts the guard over the server and stays.
WORKER = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, sys.argv[1], str(os.getpid()), sys.executable, "-c", sys.argv[2], "60"])
time.sleep(60)
"""


def guarded(seconds: str) -> tuple[subprocess.Popen[str], int, int]:
    """(guard, pid of the server, pid of the server's child)"""
    command = [sys.executable, GUARD, str(os.getpid()), sys.executable, "-c", SERVER, seconds]
    guard = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert guard.stdout is not None
    grandchild = int(guard.stdout.readline())
    return guard, psutil.Process(guard.pid).children()[0].pid, grandchild


def test_sigterm_ends_the_command_and_what_it_started():
    guard, server, grandchild = guarded("60")
    with guard:
        guard.send_signal(signal.SIGTERM)
        guard.wait(20)
    wait_until("end of the command", lambda: has_ended(server) and has_ended(grandchild))


def test_a_command_that_ends_leaves_nothing_and_gives_its_status():
    guard, _, grandchild = guarded("0.1")
    with guard:
        assert guard.wait(20) == 7
    wait_until("end of the command", lambda: has_ended(grandchild))


def test_a_killed_guard_takes_the_command_with_it():
    guard, server, grandchild = guarded("60")
    with guard:
        guard.kill()
        guard.wait(20)
    wait_until("end of the command", lambda: has_ended(server))
    psutil.Process(grandchild).kill()


def test_a_killed_worker_leaves_no_command_behind():
    with subprocess.Popen([sys.executable, "-c", WORKER, GUARD, SERVER], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        grandchild = int(worker.stdout.readline())
        server = psutil.Process(grandchild).ppid()
        worker.kill()
    wait_until("end of the command", lambda: has_ended(server) and has_ended(grandchild))


def test_a_command_that_a_signal_killed_is_said_to_be():
    guard, server, _ = guarded("60")
    with guard:
        os.kill(server, signal.SIGKILL)
        status = guard.wait(20)
    assert (status, describe_exit_status(status), describe_exit_status(2), describe_exit_status(-9)) == (
        137,
        "killed by SIGKILL",
        "exit status 2",
        "killed by SIGKILL",
    )


@pytest.mark.skipif(not can_hide(), reason="the kernel makes no namespaces here")
@pytest.mark.parametrize("end", [psutil.Process.terminate, psutil.Process.kill])
def test_a_command_sees_no_hidden_folder_and_no_other_process_and_ends_with_its_guard(
    tmp_path: Path, end: Callable[[psutil.Process], None]
):
    for name in ("hidden", "seen"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    reads = f"cat {tmp_path}/*/key /proc/{os.getpid()}/environ; umount {tmp_path}/hidden; cat {tmp_path}/hidden/key; id -u; cat"
    command = slimebus.process.process_guard.guarded_command(["sh", "-c", f"{reads}; sleep 987 & echo; wait"], [tmp_path / "hidden"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("its input\n")
        process.stdin.close()
        told = [process.stdout.readline().strip() for _ in range(3)]
        guard = psutil.Process(process.pid)
        began = guard.children(recursive=True)
        end(guard)
    assert told == [f"seen{os.geteuid()}", "its input", ""]
    assert len(began) >= 3
    wait_until("end of the command", lambda: all(has_ended(one.pid) for one in began))

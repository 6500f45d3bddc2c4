"""Runs a command and ends all of it when this process gets a signal to end, or when the process that asked for it ends.

    python process_guard.py PARENT_PID command...

For engines: a killed worker must not leave one behind. Standard library only, so that any interpreter can run it by path.
Exits with the status of the command; 128 + N when signal N killed it, as a shell does.

    parent ends, or SIGTERM, SIGINT  -->  SIGTERM to the command's process group, SIGKILL after GRACE_S
    command ends                     -->  SIGKILL to what is left of its group
    guard is killed                  -->  the kernel kills the command (PR_SET_PDEATHSIG)
"""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence

GRACE_S = 5.0
PR_SET_PDEATHSIG = 1
KILLED_BY = 128
GUARD_PATH = __file__
"""To run it by path."""


def guarded_command(command: Sequence[str]) -> list[str]:
    """The command under a guard, which ends it and all its processes on a signal to end, and when this process ends, killed or not."""
    return [sys.executable, GUARD_PATH, str(os.getpid()), *command]


def main(parent_pid: int, command: list[str]) -> int:
    """Run `command` until it ends or must; its exit status."""
    wakeup, on_signal = os.pipe()
    os.set_blocking(on_signal, False)
    signal.set_wakeup_fd(on_signal)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    libc = ctypes.CDLL(None)
    # preexec_fn is safe here: this process has one thread.
    child = subprocess.Popen(command, process_group=0, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    with selectors.DefaultSelector() as selector:
        ended = os.pidfd_open(child.pid)
        selector.register(ended, selectors.EVENT_READ)
        selector.register(wakeup, selectors.EVENT_READ)
        with contextlib.suppress(ProcessLookupError):
            selector.register(os.pidfd_open(parent_pid), selectors.EVENT_READ)
        if os.getppid() == parent_pid:
            selector.select()
    signal_group(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)
    signal_group(child.pid, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else KILLED_BY - status


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, which may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def describe_exit_status(status: int) -> str:
    """How a guarded command ended, from the status of its guard."""
    number = status - KILLED_BY if status > KILLED_BY else -status
    return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else f"exit status {status}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

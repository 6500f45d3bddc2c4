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
from collections.abc import Iterable, Sequence
from pathlib import Path

GRACE_S = 5.0
PR_SET_PDEATHSIG = 1
KILLED_BY = 128
GUARD_PATH = __file__
"""To run it by path."""
NAMESPACES = ["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
HIDE = """
while [ "$1" != -- ]; do mount -t tmpfs -o ro,size=4k tmpfs "$1" || exit 1; shift; done
shift
setpriv --ambient-caps=-all --bounding-set=-all,+chown,+dac_override,+fowner,+kill,+setgid,+setuid "$@"
exit $?
"""
"""FOLDER... -- COMMAND, of a shell in NAMESPACES, where it is process 1, which a signal to the group does not end: an empty folder hides
each; the command runs without what it takes to remove that."""


def guarded_command(command: Sequence[str], hidden: Iterable[Path] = ()) -> list[str]:
    """The command under a guard: it ends with all that it started when the guard is told to, and when this process ends, killed or not.

    hidden: folders that are empty for it, as are other processes then; only where `can_hide`.
    """
    folders = [str(folder.resolve()) for folder in hidden]
    own_user = [] if os.geteuid() == 0 else ["--user", "--map-current-user", "--keep-caps"]
    unshare = ["unshare", *own_user, *NAMESPACES, "sh", "-c", HIDE, "sh", *folders, "--"]
    return [sys.executable, GUARD_PATH, str(os.getpid()), *(unshare if folders else []), *command]


def can_hide() -> bool:
    """Whether this kernel lets us make namespaces: as root with CAP_SYS_ADMIN, or where users may."""
    with contextlib.suppress(OSError):
        return subprocess.run(guarded_command(["true"], [Path("/tmp")]), stderr=subprocess.DEVNULL, check=False).returncode == 0
    return False


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

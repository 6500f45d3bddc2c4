"""Child processes: each in a session of its own, its output kept, ended with all that it started; and the locks and ports they share."""

import contextlib
import ctypes
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from slimebus.atomic_file import make_private
from slimebus.process.process_guard import PR_SET_PDEATHSIG, guarded_command, signal_group

LineSink = Callable[[str, str], None]
"""Called with (name, line) for every line a child writes, from that child's reader thread."""

SLIMEBUS = (sys.executable, "-P", "-m", "slimebus")
"""The command of this installation; -P: without the working directory on the path."""
STOP_S, POLL_S = 3.0, 0.2
REAP_S = 30.0
"""A killed process first gives its memory back: on a busy machine more than 2 s for 4 GB."""
PORTS = range(20_000, 32_768)
"""Below those that Linux gives to a process that asks for any port (ip_local_port_range): one found free stays so until it is bound."""


class ChildProcess:
    """A command in a session of its own, which ends when this process does, killed or not.

    log: a file that its output is appended to; sink: gets each line of it as well. Without both the output is ours.
    on_parent_end: the signal that it then gets; None: a guard ends it with all that it started (process_guard.py), and has its exit status.
    """

    def __init__(
        self, command: Sequence[str], *, name: str = "", log: Path | None = None, sink: LineSink | None = None,
        environment: Mapping[str, str] | None = None, stdin: int | None = subprocess.DEVNULL, pass_fds: Sequence[int] = (),
        on_parent_end: signal.Signals | None = None,
    ) -> None:  # fmt: skip
        self.command, self.name, self.log_file, self.environment, self.ended_at = command, name, log or Path(), environment, 0.0
        with log.open("ab") if log and not sink else contextlib.nullcontext() as out:
            self.process = subprocess.Popen(
                command if on_parent_end else guarded_command(command),
                env=os.environ | (environment or {}),
                stdin=stdin,
                stdout=subprocess.PIPE if sink else out,
                stderr=subprocess.STDOUT if log else None,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=end_with_parent(on_parent_end, os.getpid()) if on_parent_end else None,
            )
        self._reader = threading.Thread(target=self._relay, args=(sink,), name=f"log-{name}", daemon=True)
        if sink:
            self._reader.start()

    def _relay(self, sink: LineSink) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError), self.process.stdout as lines, self.log_file.open("ab", buffering=0) as out:
            for line in lines:
                with contextlib.suppress(OSError):  # a full disk, which must not keep the process from writing more
                    out.write(line)
                if line.strip():
                    sink(self.name, line.decode(errors="replace").rstrip("\n"))

    def stop(self, grace_s: float, reap_s: float = REAP_S) -> None:
        """SIGTERM, then SIGKILL to what is left of its session after `grace_s` seconds."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill(reap_s)

    def kill(self, reap_s: float = REAP_S) -> None:
        """SIGKILL to what is left of its session. One that a hung file system keeps is not waited for after reap_s."""
        signal_group(self.process.pid, signal.SIGKILL)
        self.finish(reap_s)

    def finish(self, reap_s: float = REAP_S) -> None:
        """Reap the ended process and let the last lines through."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(reap_s)
        if self._reader.is_alive():
            self._reader.join(1.0)


class ProcessGroup:
    """The slimebus processes of a run on this machine. As a context manager it ends them all on the way out."""

    def __init__(self, log_dir: Path, sink: LineSink | None = None) -> None:
        self.log_dir, self.sink = log_dir, sink or (lambda name, line: None)
        self.children: list[ChildProcess] = []
        make_private(log_dir)

    def start(self, name: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> ChildProcess:
        """Start `slimebus ARGUMENTS`, with these variables besides its parent's."""
        self.children.append(self._child(name, [*SLIMEBUS, *arguments], environment))
        return self.children[-1]

    def _child(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None) -> ChildProcess:
        log = self.log_dir / f"{name}.log"
        return ChildProcess(command, name=name, log=log, sink=self.sink, environment=environment, on_parent_end=signal.SIGTERM)

    def restart(self, child: ChildProcess) -> None:
        """Replace a process that ended by a new one with the same command."""
        child.finish()
        self.children[self.children.index(child)] = self._child(child.name, child.command, child.environment)

    def ended(self) -> list[ChildProcess]:
        """Children that are no longer running; `ended_at` is when that was noticed, by the monotonic clock."""
        ended = [child for child in self.children if child.process.poll() is not None]
        for child in ended:
            child.ended_at = child.ended_at or time.monotonic()
        return ended

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM to all, then SIGKILL to what is left of each session after `grace_s` seconds.

        Those started last go first: the first one, the broker, hears the goodbyes of the others.
        """
        deadline = time.monotonic() + grace_s
        for children, until in ((self.children[1:], deadline - grace_s / 3), (self.children[:1], deadline)):
            for child in children:
                child.process.terminate()
            for child in children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(max(0.0, until - time.monotonic()))
        for child in self.children:
            child.kill()

    def __enter__(self) -> "ProcessGroup":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def end_with_parent(number: int, parent: int = 0) -> Callable[[], None]:
    """A function: the process that calls it gets signal `number` when its parent ends in any way (Linux; else nothing).

    parent: who that is; where it has ended already the caller ends at once.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if parent and os.getppid() != parent:
            os._exit(1)

    return arrange


def interrupt_on_sigterm() -> None:
    """From now on the first SIGTERM raises KeyboardInterrupt in the main thread; more of them do not disturb the leaving.

    The kernel may send several when a parent with threads is killed: one for each thread that ends.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def wait_until_left(run_dir: Path, timeout_s: float) -> bool:
    """True once no broker of this machine has this run directory: one that was killed with its parent may be on its way out."""
    file = run_dir / "broker" / "owner.lock"
    if not file.is_file():
        return True
    with locked(file, timeout_s) as is_ours:
        return is_ours


@contextlib.contextmanager
def locked(file: Path, timeout_s: float) -> Iterator[bool]:
    """Inside, no other process has this lock; False where one has kept it for so long."""
    until = time.monotonic() + timeout_s
    with file.open("a") as lock:
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > until:
                yield False
                return
            time.sleep(POLL_S)
        yield True


def free_port() -> int:
    """A TCP port that nothing listens on now, at any address, and that the kernel gives to nobody who asks for any."""
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))  # processes that were forked draw apart
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port

"""Child processes of one machine: started in their own sessions, their output relayed, ended together for certain."""

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

LineSink = Callable[[str, str], None]
"""Called with (role, line) for every line a child writes, from that child's reader thread."""

STOP_S, LOOK_S = 3.0, 0.2
PORTS = range(20_000, 32_768)
"""Below those that Linux gives to whoever asks for any port (ip_local_port_range): one found free stays so until it is bound."""
PR_SET_PDEATHSIG = 1


class Child:
    """A running `slimebus ARGUMENTS`, which dies with this process, whatever ends it; a thread relays its output to a file and a sink."""

    def __init__(
        self, role: str, arguments: Sequence[str], log_file: Path, sink: LineSink | None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.role, self.arguments, self.log_file, self.ended_at = role, arguments, log_file, 0.0
        self.environment = environment
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slimebus", *arguments],
            env=os.environ | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=end_with_parent(signal.SIGTERM, os.getpid()),
        )
        self._reader = threading.Thread(target=self._relay, args=(sink,), name=f"log-{role}", daemon=True)
        self._reader.start()

    def _relay(self, sink: LineSink | None) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(OSError), self.process.stdout as lines, self.log_file.open("a", buffering=1) as out:
            for line in lines:
                with contextlib.suppress(OSError):  # a full disk, which must not keep the process from writing more
                    out.write(line)
                if sink is not None and line.strip():
                    sink(self.role, line.rstrip("\n"))

    def kill(self) -> None:
        """SIGKILL to whatever is left of its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.finish()

    def finish(self) -> None:
        """Reap the ended process and let the last lines through."""
        self.process.wait(1.0)
        self._reader.join(1.0)


class Fleet:
    """The processes of a run on this machine. As a context manager it ends them all on the way out."""

    def __init__(self, log_dir: Path, sink: LineSink | None = None) -> None:
        self.log_dir, self.sink = log_dir, sink
        self.children: list[Child] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(self, role: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Child:
        """Start `slimebus ARGUMENTS`, with these variables besides its parent's."""
        self.children.append(Child(role, arguments, self.log_dir / f"{role}.log", self.sink, environment))
        return self.children[-1]

    def start_again(self, child: Child) -> None:
        """Another process in the place of one that ended."""
        child.finish()
        self.children[self.children.index(child)] = Child(child.role, child.arguments, child.log_file, self.sink, child.environment)

    def ended(self) -> list[Child]:
        """Children that are no longer running; `ended_at` is when that was noticed, by the monotonic clock."""
        found = [child for child in self.children if child.process.poll() is not None]
        for child in found:
            child.ended_at = child.ended_at or time.monotonic()
        return found

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM to all, then SIGKILL to whatever is left of each session after `grace_s` seconds.

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

    def stop_one(self, child: Child, grace_s: float = STOP_S) -> None:
        """The same for one, which then is no longer of the fleet."""
        child.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(grace_s)
        child.kill()
        self.children.remove(child)

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def end_with_parent(number: int, parent: int = 0) -> Callable[[], None]:
    """A function: the process that calls it gets signal `number` when its parent ends, whatever ends that (Linux; else nothing).

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
            time.sleep(LOOK_S)
        yield True


def free_port() -> int:
    """A TCP port that nothing listens on now, at any address, and that the kernel gives to nobody who asks for any."""
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))  # processes that were forked draw apart
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port

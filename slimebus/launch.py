"""Child processes of one machine: started in their own sessions, their output relayed, ended together for certain."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

LineSink = Callable[[str, str], None]
"""Called with (role, line) for every line a child writes, from that child's reader thread."""

STOP_S = 3.0
PR_SET_PDEATHSIG = 1


class Child:
    """One running process and the thread that relays its output to a file and a sink."""

    def __init__(self, role: str, process: "subprocess.Popen[str]", log_file: Path, sink: LineSink | None) -> None:
        self.role, self.process, self.log_file = role, process, log_file
        self._reader = threading.Thread(target=self._relay, args=(sink,), name=f"log-{role}", daemon=True)
        self._reader.start()

    def _relay(self, sink: LineSink | None) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines, self.log_file.open("a", buffering=1) as out:
            for line in lines:
                out.write(line)
                if sink is not None:
                    sink(self.role, line.rstrip("\n"))

    def finish(self) -> None:
        """Reap the ended process and let the last lines through."""
        self.process.wait(1.0)
        self._reader.join(1.0)

    def tail(self) -> str:
        """The last 15 lines it wrote."""
        self._reader.join(1.0)
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:])


class Fleet:
    """The processes of a run on this machine. As a context manager it ends them all on the way out."""

    def __init__(self, log_dir: Path, sink: LineSink | None = None) -> None:
        self.log_dir, self.sink = log_dir, sink
        self.children: list[Child] = []
        log_dir.mkdir(parents=True, exist_ok=True)

    def start(self, role: str, arguments: Sequence[str]) -> Child:
        """Start `slimebus ARGUMENTS`; it dies with this process, whatever ends it."""
        process = subprocess.Popen(
            [sys.executable, "-m", "slimebus", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_die_with_parent(os.getpid()) if sys.platform == "linux" else None,
        )
        child = Child(role, process, self.log_dir / f"{role}.log", self.sink)
        self.children.append(child)
        return child

    def ended(self) -> list[Child]:
        """Children that are no longer running."""
        return [child for child in self.children if child.process.poll() is not None]

    def stop(self, grace_s: float = STOP_S) -> None:
        """SIGTERM to all, then SIGKILL to whatever is left of each session after `grace_s` seconds.

        Those started last go first: the first one, the broker, hears the goodbyes of the others.
        """
        deadline = time.monotonic() + grace_s
        first, others = self.children[:1], self.children[1:]
        for child in others:
            _terminate(child)
        _wait(others, deadline - grace_s / 3)
        for child in first:
            _terminate(child)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)
            child.finish()

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def _terminate(child: Child) -> None:
    if child.process.poll() is None:
        child.process.terminate()


def _wait(children: Sequence[Child], deadline: float) -> None:
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))


def end_with_parent(number: int) -> None:
    """From now on this process gets signal `number` when the one that started it ends, whatever ends it (Linux; else nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def interrupt_on_sigterm() -> None:
    """From now on the first SIGTERM raises KeyboardInterrupt in the main thread; more of them do not disturb the leaving.

    The kernel may send several when a parent with threads is killed: one for each thread that ends.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def _die_with_parent(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None).prctl

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it ended before we asked
            os._exit(1)

    return arrange


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

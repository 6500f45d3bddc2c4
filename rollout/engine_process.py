"""An engine as a child process: start it, wait until it is ready, end it and everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path
from types import TracebackType

from rollout.sglang_client import EngineClient
from slimebus.errors import SlimebusError, Unreachable
from slimebus.launch import free_port

LOG_TAIL_LINES = 30
STOP_S = 10.0
REAP_S = 30.0
"""A killed process first gives its memory back: on a busy machine more than 2 s for 4 GB."""


class EngineStartError(SlimebusError):
    """An engine process ended, or was not ready in time; the text ends with the tail of its log."""

    code = "engine-start"


class EngineProcess:
    """A command that serves the engine contract on `url`, in a process group of its own; its output goes to `log_path`."""

    def __init__(self, command: list[str], url: str, log_path: Path, *, env: dict[str, str] | None = None) -> None:
        self.command, self.url, self.log_path = command, url.rstrip("/"), log_path
        self.environment = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> EngineProcess:
        self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Process id once started."""
        return None if self._process is None else self._process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command and return its process; what it writes is appended to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        return self._process

    def is_dead(self) -> bool:
        """Whether the process was not started or has ended."""
        return self._process is None or self._process.poll() is not None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine is ready; EngineStartError with its log's tail when it ended or took too long."""
        async with EngineClient(self.url) as client:
            try:
                await client.wait_ready(timeout_s, is_dead=self.is_dead)
            except Unreachable as error:
                raise EngineStartError(self._why(error.text)) from None

    def _why(self, text: str) -> str:
        status = None if self._process is None else self._process.poll()
        ended = "" if status is None else f" (exit status {status})"
        return f"{text}{ended}; command: {' '.join(self.command)}; the end of {self.log_path}:\n{self.log_tail()}"

    def log_tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of the log."""
        try:
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return "(no log)"

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End the process group: SIGTERM, then SIGKILL after `timeout_s`; also what outlived its leader. Idempotent."""
        if self._process is None:
            return
        group = self._process.pid
        _signal_group(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        # Also when the leader ended in time: SGLang's scheduler and detokenizer may outlive it.
        _signal_group(group, signal.SIGKILL)
        self._process.wait(REAP_S)
        self._process = None


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def embedded_engine(
    model_path: Path, log_path: Path, *, host: str = "127.0.0.1", port: int = 0, arguments: tuple[str, ...] = (), python: str = ""
) -> EngineProcess:
    """The embedded CPU engine on `model_path`; port 0 takes a free one. It ends when this process ends."""
    import sys

    port = port or free_port()
    command = [
        *(python or sys.executable, "-m", "rollout.engine", "--model-path", str(model_path)),
        *("--host", host, "--port", str(port), f"--exit-with-parent={os.getpid()}"),
        *arguments,
    ]
    return EngineProcess(command, f"http://{host}:{port}", log_path)

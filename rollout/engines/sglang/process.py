"""An engine as a child process: start it, wait until it is ready, end it and everything it started.

worker --> process_guard.py --> engine --> what it starts         whoever ends first, those on its right end too
"""

import subprocess
from pathlib import Path

from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.process.launch import ChildProcess
from slimebus.process.process_guard import ending

LOG_TAIL_LINES = 30
STOP_S = 10.0


class EngineStartError(SlimebusError):
    """An engine process ended, or was not ready in time; the text ends with the tail of its log."""

    code = "engine-start"


class EngineProcess:
    """A command that serves the engine contract on `url`, in a process group of its own; its output goes to `log_path`.

    It ends when this process does, killed or not.
    """

    def __init__(self, command: list[str], url: str, log_path: Path, *, env: dict[str, str] | None = None, api_key: str = "") -> None:
        """api_key: what the command was told that clients must send."""
        self.command, self.url, self.log_path, self.api_key = command, url.rstrip("/"), log_path, api_key
        self.environment = {"PYTHONSAFEPATH": "1", **(env or {})}
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        """Process id of its guard, once started."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command and return its process; what it writes is appended to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._child = ChildProcess(self.command, log=self.log_path, environment=self.environment)
        return self._child.process

    def is_dead(self) -> bool:
        """Whether the process was not started or has ended."""
        return self._child is None or self._child.process.poll() is not None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine is ready; EngineStartError with its log's tail when it ended or took too long."""
        async with EngineClient(self.url, api_key=self.api_key) as client:
            try:
                await client.wait_ready(timeout_s, is_dead=self.is_dead)
            except Unreachable as error:
                raise EngineStartError(self.why(error.text)) from None

    def why(self, text: str) -> str:
        """This text, how the process ended, and the tail of its log."""
        status = None if self._child is None else self._child.process.poll()
        ended = "" if status is None else f" ({ending(status)})"
        tail = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{text}{ended}; command: {' '.join(self.command)}; the end of {self.log_path}:", *tail])

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End it and all that it started: SIGTERM, then SIGKILL after `timeout_s`. Idempotent."""
        if self._child is not None:
            self._child.stop(timeout_s)
        self._child = None

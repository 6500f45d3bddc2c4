"""An engine as a child process: start it, wait until it is ready, end it and everything it started.

worker --> process_guard.py --> engine --> what it starts         whoever ends first, those on its right end too
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from rollout.engines.sglang.client import EngineClient
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.process.process_guard import GUARD_PATH, ending, signal_group

LOG_TAIL_LINES = 30
STOP_S = 10.0
REAP_S = 30.0
"""A killed process first gives its memory back: on a busy machine more than 2 s for 4 GB."""


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
        self.environment = {**os.environ, "PYTHONSAFEPATH": "1", **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id of its guard, once started."""
        return None if self._process is None else self._process.pid

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command and return its process; what it writes is appended to the log."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            guarded = [sys.executable, GUARD_PATH, str(os.getpid()), *self.command]
            self._process = subprocess.Popen(
                guarded, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        return self._process

    def is_dead(self) -> bool:
        """Whether the process was not started or has ended."""
        return self._process is None or self._process.poll() is not None

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine is ready; EngineStartError with its log's tail when it ended or took too long."""
        async with EngineClient(self.url, api_key=self.api_key) as client:
            try:
                await client.wait_ready(timeout_s, is_dead=self.is_dead)
            except Unreachable as error:
                raise EngineStartError(self.why(error.text)) from None

    def why(self, text: str) -> str:
        """This text, how the process ended, and the tail of its log."""
        status = None if self._process is None else self._process.poll()
        ended = "" if status is None else f" ({ending(status)})"
        tail = self.log_path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{text}{ended}; command: {' '.join(self.command)}; the end of {self.log_path}:", *tail])

    def stop(self, timeout_s: float = STOP_S) -> None:
        """End the process group: SIGTERM, then SIGKILL after `timeout_s`; also what outlived its leader. Idempotent."""
        if self._process is None:
            return
        group = self._process.pid
        signal_group(group, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        # Also when the leader ended in time: SGLang's scheduler and detokenizer may outlive it.
        signal_group(group, signal.SIGKILL)
        self._process.wait(REAP_S)
        self._process = None

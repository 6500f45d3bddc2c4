"""The page's process beside a broker: its address and its start."""

import contextlib
import os
import signal
import subprocess
import sys

from slimebus.config import Resolved
from slimebus.process.launch import end_with_parent
from slimebus.security.exposure import reachable
from slimebus.security.http_address import listen, write_address
from slimebus.view.report import page_url

STOP_S = 5.0


class PageProcess:
    """The page of a broker at `endpoint`, at the address `url`, from now until `stop`."""

    def __init__(self, resolved: Resolved, endpoint: str) -> None:
        """Raises UsageError when broker.http cannot be bound."""
        keys = resolved.keys_path
        listening, self.url = listen(resolved.config.broker.http, page_url(resolved.run_dir))
        write_address(resolved.run_dir / "page.url", self.url)
        with listening:
            words = ["view", str(resolved.run_dir), "--broker", reachable(endpoint), "--listening", str(listening.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slimebus", *words, *(["--keys", str(keys.resolve())] if keys else [])],
                stdin=subprocess.DEVNULL,
                pass_fds=[listening.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL, os.getpid()),
            )

    def stop(self) -> None:
        """End the page; it holds nothing that could be lost. One that a hung file system keeps is not waited for."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)

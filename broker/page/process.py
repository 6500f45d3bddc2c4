"""The page's process beside a broker: its address, its start, and another start where it ended."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from slimebus.bus.errors import UsageError
from slimebus.bus.security.exposure import OUTSIDE, advertised, is_local, reachable
from slimebus.cli.config import Resolved
from slimebus.cli.launch import end_with_parent

log = logging.getLogger("slimebus.page")

URL_FILE = "page.url"
STOP_S = 2.0
LONGEST_REST_S = 60.0


def listen(address: str, last: str = "") -> tuple[socket.socket, str]:
    """A socket bound at HOST:PORT, and the address for a browser. Raises UsageError when it cannot be bound.

    last: the address of an earlier process, whose port is taken again where the port is free to choose, and whose token stays valid.
    """
    wanted, before = urlsplit(f"//{address}"), urlsplit(last)
    ports = [wanted.port] if wanted.port else [before.port or 0, 0]
    host = wanted.hostname or ""
    for port in ports:
        listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen()
            break
        except OSError as bad:
            listening.close()
            if port == ports[-1]:
                raise UsageError(f"the page cannot listen at {address}: {bad.strerror}; give another --http HOST:PORT") from None
    shown = f"tcp://{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
    if is_local(shown):
        return listening, f"{shown.replace('tcp:', 'http:')}/"
    with contextlib.suppress(OSError):  # it has no network
        shown = advertised(shown, "", OUTSIDE)
    token = token_of(last) or secrets.token_urlsafe(24)
    return listening, f"{shown.replace('tcp:', 'http:')}/?token={token}"


def token_of(url: str) -> str:
    """The token in an address of the page; empty where it needs none."""
    return parse_qs(urlsplit(url).query).get("token", [""])[0]


class PageProcess:
    """The page of a broker at `endpoint`, at the address `url`, from now until `stop`; a process that ends is started again."""

    def __init__(self, resolved: Resolved, endpoint: str) -> None:
        """Raises UsageError when broker.http cannot be bound."""
        file = resolved.run_dir / URL_FILE
        self._listening, self.url = listen(resolved.config.broker.http, file.read_text() if file.is_file() else "")
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(self.url)
        self._words = ["view", str(resolved.run_dir), "--broker", reachable(endpoint), "--listening", str(self._listening.fileno())]
        self._words += ["--keys", str(resolved.keys_path.resolve())] if resolved.keys_path else []
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep_running, name="page", daemon=True)
        self._thread.start()

    def _keep_running(self) -> None:
        rest_s = 1.0
        while not self._stopping.is_set():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "slimebus", *self._words],
                stdin=subprocess.DEVNULL,
                pass_fds=[self._listening.fileno()],
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL, os.getpid()),
            )
            code = self._process.wait()
            if not self._stopping.is_set():
                log.warning("the page's process ended with code %d; the run goes on, and the page is started again", code)
                self._stopping.wait(rest_s)
                rest_s = min(LONGEST_REST_S, 2 * rest_s)

    def stop(self) -> None:
        """End the page."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill()  # it holds nothing that could be lost
        self._thread.join(STOP_S)
        self._listening.close()


def last_url(run_dir: Path) -> str:
    """Where the run's broker serves its page; empty where it serves none."""
    with contextlib.suppress(OSError):
        return (run_dir / URL_FILE).read_text()
    return ""

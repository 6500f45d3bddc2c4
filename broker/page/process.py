"""The page's process beside a broker: its address and its start."""

import contextlib
import logging
import secrets
import signal
import socket
import threading
import time
from urllib.parse import parse_qs, urlsplit

from slimebus.atomic_file import replacing
from slimebus.bus.errors import UsageError
from slimebus.config import Resolved
from slimebus.process.launch import SLIMEBUS, ChildProcess
from slimebus.security.exposure import OUTSIDE, advertised, reachable
from slimebus.view.report import page_url

log = logging.getLogger("slimebus.broker")

SHOW_END_S, REAP_S = 1.0, 5.0
RESTART_S, MAX_PAUSE_S = 1.0, 60.0
"""Before the page is started again, the first time and at most."""


class PageProcess:
    """The page of a broker at `endpoint`, at the address `url`, from now until `stop`. One that ends before is started again."""

    def __init__(self, resolved: Resolved, endpoint: str) -> None:
        """Raises UsageError when broker.http cannot be bound."""
        keys = resolved.keys_path
        self._listening, self.url = listen(resolved.config.broker.http, page_url(resolved.run_dir))
        with replacing(resolved.run_dir / "page.url", mode=0o600, sync=False) as out:
            out.write(self.url.encode())
        words = ["view", str(resolved.run_dir), "--broker", reachable(endpoint), "--listening", str(self._listening.fileno())]
        self._command = [*SLIMEBUS, *words, *(["--keys", str(keys.resolve())] if keys else [])]
        self._stopping, self._starting = threading.Event(), threading.Lock()
        try:
            self._start()
        except OSError:
            self._listening.close()  # or viewers would wait for nobody
            raise
        threading.Thread(target=self._keep_up, name="page", daemon=True).start()

    def _start(self) -> None:
        with self._starting:
            if not self._stopping.is_set():
                self._child = ChildProcess(self._command, pass_fds=[self._listening.fileno()], on_parent_end=signal.SIGKILL)
                self._started_at = time.monotonic()

    def _keep_up(self) -> None:
        """Each time that the page ends, wait twice as long as before: one that cannot start must not take the run's cores."""
        pause_s = RESTART_S
        while not self._stopping.is_set():
            code = self._child.process.wait()
            pause_s = RESTART_S if time.monotonic() - self._started_at > MAX_PAUSE_S else pause_s
            if not self._stopping.is_set():
                log.warning("the page's process ended (exit code %d); it is started again in %g s", code, pause_s)
            self._stopping.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            with contextlib.suppress(OSError):  # no memory for another process now
                self._start()

    def stop(self) -> None:
        """End the page, once it has shown how the run ended; one that a hung file system keeps is not waited for."""
        with self._starting:
            self._stopping.set()
        self._child.stop(SHOW_END_S, reap_s=REAP_S)
        self._listening.close()


def listen(address: str, last: str = "") -> tuple[socket.socket, str]:
    """A socket bound at HOST:PORT, and the address with its token for a browser. Raises UsageError when it cannot be bound.

    last: the address of an earlier process: its port is taken again where the port is free to choose, and its token stays valid.
    """
    wanted, before = urlsplit(f"//{address}"), urlsplit(last)
    host, ports = wanted.hostname or "", [wanted.port] if wanted.port else [before.port or 0, 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            listening = socket.create_server((host, port), family=family, dualstack_ipv6=family == socket.AF_INET6)
            break
        except OSError as bad:
            if port == ports[-1] or isinstance(bad, socket.gaierror):  # no port helps a name that is unknown, and asking takes seconds
                raise UsageError(f"cannot listen at {address}: {bad.strerror}; give another --http HOST:PORT") from None
    shown = f"tcp://{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
    with contextlib.suppress(OSError):  # it has no network
        shown = advertised(shown, "", OUTSIDE)
    token = token_of(last) or secrets.token_urlsafe(24)
    return listening, f"{shown.replace('tcp:', 'http:')}/?token={token}"


def token_of(url: str) -> str:
    """The token in an address."""
    return parse_qs(urlsplit(url).query).get("token", [""])[0]

"""The page's process beside a broker: its address and its start."""

import contextlib
import secrets
import signal
import socket
from urllib.parse import parse_qs, urlsplit

from slimebus.atomic_file import replacing
from slimebus.bus.errors import UsageError
from slimebus.config import Resolved
from slimebus.process.launch import SLIMEBUS, ChildProcess
from slimebus.security.exposure import OUTSIDE, advertised, reachable
from slimebus.view.report import page_url

SHOW_END_S, REAP_S = 1.0, 5.0


class PageProcess:
    """The page of a broker at `endpoint`, at the address `url`, from now until `stop`."""

    def __init__(self, resolved: Resolved, endpoint: str) -> None:
        """Raises UsageError when broker.http cannot be bound."""
        keys = resolved.keys_path
        listening, self.url = listen(resolved.config.broker.http, page_url(resolved.run_dir))
        with replacing(resolved.run_dir / "page.url", mode=0o600, sync=False) as out:
            out.write(self.url.encode())
        with listening:
            words = ["view", str(resolved.run_dir), "--broker", reachable(endpoint), "--listening", str(listening.fileno())]
            words += ["--keys", str(keys.resolve())] if keys else []
            self._child = ChildProcess([*SLIMEBUS, *words], pass_fds=[listening.fileno()], on_parent_end=signal.SIGKILL)

    def stop(self) -> None:
        """End the page, once it has shown how the run ended; one that a hung file system keeps is not waited for."""
        self._child.stop(SHOW_END_S, reap_s=REAP_S)


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

"""Where a process serves HTTP: a bound socket, and the address that others open, with a token beyond this machine."""

import contextlib
import secrets
import socket
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from slimebus.atomic_file import replacing
from slimebus.bus.errors import UsageError
from slimebus.security.exposure import OUTSIDE, advertised, is_local


def listen(address: str, last: str = "", *, path: str = "", num_ports: int = 0) -> tuple[socket.socket, str]:
    """A socket bound at HOST:PORT, and the address of `path` for a client. Raises UsageError when it cannot be bound.

    last: the address of an earlier process, whose port is taken again where the port is free to choose, and whose token stays valid.
    num_ports: so many are tried after the given one, which is another process's; 0: that itself.
    """
    wanted, before = urlsplit(f"//{address}"), urlsplit(last)
    host, first = wanted.hostname or "", wanted.port or 0
    ports = [*range(first + 1, min(first + 1 + num_ports, 65536))] or [first] if first else [before.port or 0, 0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        try:
            listening = socket.create_server((host, port), family=family, dualstack_ipv6=family == socket.AF_INET6)
            break
        except OSError as bad:
            if port == ports[-1] or isinstance(bad, socket.gaierror):  # no port helps a name that is unknown, and asking takes seconds
                raise UsageError(f"cannot listen at {address}: {bad.strerror}; give another --http HOST:PORT") from None
    shown = f"tcp://{address.rpartition(':')[0]}:{listening.getsockname()[1]}"
    if is_local(shown):
        return listening, f"{shown.replace('tcp:', 'http:')}/{path}"
    with contextlib.suppress(OSError):  # it has no network
        shown = advertised(shown, "", OUTSIDE)
    token = token_of(last) or secrets.token_urlsafe(24)
    return listening, f"{shown.replace('tcp:', 'http:')}/{path}?token={token}"


def token_of(url: str) -> str:
    """The token in an address; empty where it needs none."""
    return parse_qs(urlsplit(url).query).get("token", [""])[0]


def write_address(file: Path, url: str) -> None:
    """Keep an address for this user alone. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, mode=0o600, sync=False) as out:
        out.write(url.encode())


def read_address(file: Path) -> str:
    """The address that was kept; empty where there is none, or a damaged one."""
    with contextlib.suppress(OSError, ValueError):
        url = file.read_text()
        return url if urlsplit(url).port else ""
    return ""

"""How a bound address is reached, from where, and the rule that none is open to other machines without keys."""

import contextlib
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from slimebus.bus.errors import UsageError

LOCAL_TRANSPORTS = ("ipc", "inproc")
ADDRESS = re.compile(r"tcp://([^/\s:]+|\[[^\]\s]+\]):(?P<port>\d{1,5})|(ipc|inproc)://\S+")
ANYWHERE = ("0.0.0.0", "*", "[::]")
OPEN = (
    "anyone could read samples and weights or take the trainer's place. Make keys with `slimebus keys init keys` and give them "
    "with --keys keys (docs/security.md), or bind 127.0.0.1, or choose --insecure on a network where you trust everyone"
)
OUTSIDE, OUTSIDE_V6 = "tcp://198.51.100.1:9", "tcp://[2001:db8::1]:9"
"""Addresses that are nobody's (RFC 5737, 3849): which interface they would be sought through is all that matters."""


def is_address(text: str) -> bool:
    """True for tcp://HOST:PORT with a port of 0 to 65535, or another transport's address."""
    found = ADDRESS.fullmatch(text)
    return found is not None and text.isprintable() and int(found["port"] or 0) <= 65535


def is_local(address: str) -> bool:
    """True when only processes of this machine can connect to what is bound at `address`. A host name other than localhost is not."""
    transport, _, rest = address.partition("://")
    if transport in LOCAL_TRANSPORTS:
        return True
    host = rest.rpartition(":")[0].strip("[]").partition("%")[0]
    if transport != "tcp" or host == "localhost":
        return transport == "tcp"
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return (mapped or ip).is_loopback


def reachable(announced: str, known: str = "tcp://127.0.0.1:0") -> str:
    """An address that a server announced, with the host we know it by where it only named all its interfaces: this one, unless given."""
    host = known.split("//", 1)[-1].rpartition(":")[0].replace("localhost", "127.0.0.1")
    for anywhere in ANYWHERE:
        announced = announced.replace(f"//{anywhere}:", f"//{host}:")
    return announced


def advertised(endpoint: str, host: str, broker: str = "") -> str:
    """The address for others: the bound one, with `host` instead of its own where given.

    One bound on every interface becomes this machine's address on the way to the broker, tcp://HOST:PORT, where that is given;
    on the way out, where the broker is on this machine, which tells nothing of how others see it.
    """
    if not host and broker and any(f"//{name}:" in endpoint for name in ANYWHERE):
        host = own_host(broker)
        if is_local(f"tcp://{host}:0"):
            with contextlib.suppress(OSError):  # it has no network
                host = own_host(OUTSIDE_V6 if host.startswith("[") else OUTSIDE)
    if not host:
        return endpoint
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}"


def own_host(peer: str) -> str:
    """The address of this machine on the way to `peer`, tcp://HOST:PORT. Nothing is sent."""
    target = urlsplit(peer)
    host = target.hostname or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, target.port or 1))
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family == socket.AF_INET6 else found


def check_bind(address: str, field: str, *, has_keys: bool, insecure: bool) -> None:
    """Raise UsageError for what is no address, and for one beyond this machine without keys, unless `insecure` was chosen.

    field: where the address came from.
    """
    if not is_address(address.replace(":*", ":0")):
        raise UsageError(f"{field} is {address[:200]!r}; expected tcp://HOST:PORT with a port of 0 to 65535, or ipc://PATH")
    if not (has_keys or insecure or is_local(address)):
        raise UsageError(f"{field} {address} can be reached from other machines, and there are no keys: {OPEN}", code="insecure")


def insecure_note(address: str) -> str:
    """The line for log and status while an address beyond this machine is served without keys; empty when it is not."""
    if is_local(address):
        return ""
    return f"INSECURE: {address} is open to every machine that reaches it, without encryption or authentication"

"""How an engine gets its weights: a directory that it reads, or a broadcast."""

import contextlib
import socket
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from rollout.engines.client import EngineClient
from slimebus.bus.errors import ConfigError

Kind = Literal["disk", "broadcast"]
EMBEDDED = "slimebus"
"""How the version of an embedded engine begins, in /server_info."""


class WeightRoute(NamedTuple):
    """kind: how tensors go there; num_ranks: processes of the engine that each need them; is_sglang: not the embedded engine."""

    kind: Kind
    num_ranks: int
    is_sglang: bool


async def find_route(client: EngineClient, setting: Kind | Literal["auto"]) -> WeightRoute:
    """The route to an engine that is up, as engine.weight_route says. Raises ConfigError for one that it cannot take."""
    about = await client.server_info()
    is_sglang = not str(about.get("version", "")).startswith(EMBEDDED)
    num_ranks = int(about.get("tp_size") or 1) * int(about.get("pp_size") or 1)
    has_replicas = int(about.get("dp_size") or 1) > 1  # SGLang takes no tensors then
    if setting == "auto":
        setting = "broadcast" if is_sglang and not has_replicas and not is_here(client.url) else "disk"
    elif setting == "broadcast" and (not is_sglang or has_replicas):
        why = "data-parallel replicas" if has_replicas else "the embedded engine"
        raise ConfigError(f"engine.weight_route is broadcast, but {why} at {client.url} can only load from a directory; set auto or disk")
    return WeightRoute(setting, num_ranks, is_sglang)


def is_here(url: str) -> bool:
    """Whether the host of this URL is an address of this machine. Nothing is sent."""
    host = urlsplit(url).hostname or ""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except socket.gaierror:
        return False
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False

"""What a worker passes on to others of the weights it pulls (weights.fanout_bind)."""

import socket
from urllib.parse import urlsplit

from slimebus.config.schema import WeightsConfig
from slimebus.security.pullers import Pullers
from slimebus.transport.client import Client
from slimebus.weights.link import advertised, with_key
from slimebus.weights.onward import Onward
from slimebus.weights.server import WeightServer

ANYWHERE = ("0.0.0.0", "*", "[::]")


class Relay:
    """A weight server beside the puller. address: where others reach it."""

    def __init__(self, client: Client, config: WeightsConfig) -> None:
        """Raises SlimebusError for an address that cannot be bound, or when the broker does not say whose keys may pull."""
        self.pullers = Pullers(client)
        self.onward = Onward()
        self.server = WeightServer(self.onward, config.fanout_bind, keyring=self.pullers.keyring)
        host = config.fanout_advertise
        if not host and any(f"//{name}:" in config.fanout_bind for name in ANYWHERE):
            host = own_host(client.address)
        self.address = with_key(advertised(self.server.endpoint, host), self.pullers.public)

    def close(self) -> None:
        """Stop serving."""
        self.server.close()


def own_host(peer: str) -> str:
    """The address of this machine on the way to `peer`, tcp://HOST:PORT. Nothing is sent."""
    target = urlsplit(peer)
    host = target.hostname or "127.0.0.1"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, target.port or 1))
        found = str(probe.getsockname()[0])
    return f"[{found}]" if family == socket.AF_INET6 else found

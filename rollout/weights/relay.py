"""What a worker passes on to others of the weights it pulls (weights.fanout_bind)."""

from slimebus.bus.transport.client import Client
from slimebus.bus.transport.server import Limits, connections_of
from slimebus.client.pull_keyring import PullKeyring
from slimebus.config.schema import RunConfig
from slimebus.security.exposure import advertised
from slimebus.weights.pull.connection import with_key
from slimebus.weights.store.relay_payloads import RelayPayloads
from slimebus.weights.store.server import WeightServer


class WeightRelay:
    """A weight server beside the puller. address: where others reach it."""

    def __init__(self, client: Client, config: RunConfig) -> None:
        """Raises SlimebusError for an address that cannot be bound, or when the broker does not say whose keys may pull."""
        keyring = PullKeyring.of(client)
        self.payloads = RelayPayloads()
        limits = Limits(max_connections=connections_of(config.broker.max_clients))
        self.server = WeightServer(self.payloads, config.weights.fanout_bind, keyring=keyring, limits=limits)
        self.address = with_key(advertised(self.server.endpoint, "", client.address), keyring.pair.public if keyring else "")

    def close(self) -> None:
        """Stop serving."""
        self.server.close()

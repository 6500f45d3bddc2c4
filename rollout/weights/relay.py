"""What a worker passes on to others of the weights it pulls (weights.fanout_bind)."""

from slimebus.bus.transport.client import Client
from slimebus.client.pull_keyring import PullKeyring
from slimebus.config.schema import WeightsConfig
from slimebus.security.exposure import advertised
from slimebus.weights.pull.connection import with_key
from slimebus.weights.store.relay_payloads import RelayPayloads
from slimebus.weights.store.server import WeightServer


class WeightRelay:
    """A weight server beside the puller. address: where others reach it."""

    def __init__(self, client: Client, config: WeightsConfig) -> None:
        """Raises SlimebusError for an address that cannot be bound, or when the broker does not say whose keys may pull."""
        keyring = PullKeyring.of(client)
        self.payloads = RelayPayloads()
        self.server = WeightServer(self.payloads, config.fanout_bind, keyring=keyring)
        self.address = with_key(advertised(self.server.endpoint, "", client.address), keyring.pair.public if keyring else "")

    def close(self) -> None:
        """Stop serving."""
        self.server.close()

"""What a worker passes on to others of the weights it pulls (weights.fanout_bind)."""

from slimebus.config.schema import WeightsConfig
from slimebus.security.pullers import Pullers
from slimebus.transport.client import Client
from slimebus.weights.link import advertised, with_key
from slimebus.weights.onward import Onward
from slimebus.weights.server import WeightServer


class Relay:
    """A weight server beside the puller. address: where others reach it."""

    def __init__(self, client: Client, config: WeightsConfig) -> None:
        """Raises SlimebusError for an address that cannot be bound, or when the broker does not say whose keys may pull."""
        self.pullers = Pullers(client)
        self.onward = Onward()
        self.server = WeightServer(self.onward, config.fanout_bind, keyring=self.pullers.keyring)
        self.address = with_key(advertised(self.server.endpoint, config.fanout_advertise, client.address), self.pullers.public)

    def close(self) -> None:
        """Stop serving."""
        self.server.close()

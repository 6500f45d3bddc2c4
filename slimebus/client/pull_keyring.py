"""Whose keys may pull from a weight server: the broker's allow-list, learnt over the bus."""

import time
from concurrent.futures import Future

from slimebus.bus.messages import Keys, KeysReply
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.request import ReceivedReply
from slimebus.client.connect import BROKER_AWAY_S
from slimebus.security.allow_list import Grants
from slimebus.security.keyring import grants_from

ASK_EVERY_S = 2.0


class PullKeyring:
    """The keyring of a weight server: its own pair is the client's, the keys it accepts are the broker's list."""

    def __init__(self, client: Client) -> None:
        """Asks the broker, and waits for the answer. Raises SlimebusError."""
        assert client.credentials is not None, "without keys everyone may pull"
        self._client, self.pair = client, client.credentials.pair
        self.grants: Grants = {}
        self.generation, self.problem, self._ask_at = 0, "", 0.0
        self._take_over(client.call(Keys(), timeout_s=BROKER_AWAY_S))

    @classmethod
    def for_client(cls, client: Client) -> "PullKeyring | None":
        """None without keys, and then everyone may pull."""
        return cls(client) if client.credentials is not None else None

    def refresh(self) -> None:
        """Ask for the list when a heartbeat's answer tells of another, without heartbeats now and then, and take it over when it comes.

        Does not wait.
        """
        if self._client.keys_generation != self.generation and time.monotonic() >= self._ask_at:
            self._ask_at = time.monotonic() + ASK_EVERY_S
            self._client.submit(Keys(have=self.generation)).add_done_callback(self._on_reply)

    def _on_reply(self, future: "Future[ReceivedReply]") -> None:
        if not future.cancelled() and future.exception() is None:
            self._take_over(future.result())

    def _take_over(self, reply: ReceivedReply) -> None:
        """A reply without a list says that ours is the newest."""
        if isinstance(reply.message, KeysReply) and reply.bulk:
            self.grants, self.generation = grants_from(reply.bulk[0]), reply.message.generation

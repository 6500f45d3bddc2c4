"""Whose keys may pull from a weight server: the broker's allow-list, learnt over the bus."""

import threading
from concurrent.futures import Future

from slimebus.bus.messages import Keys, KeysReply
from slimebus.bus.security.keyring import LearntKeyring
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.request import Reply


class PullKeyring:
    """The keyring of a weight server. keyring: None without keys, and then everyone may pull."""

    def __init__(self, client: Client) -> None:
        """Asks the broker, and waits for the answer. Raises SlimebusError."""
        self._client, self._closing = client, threading.Event()
        self.keyring: LearntKeyring | None = None
        if client.credentials is not None:
            self.keyring = LearntKeyring(client.credentials.pair)
            self._take_over(client.call(Keys(), timeout_s=60.0))

    @property
    def public(self) -> str:
        """The key that pullers must expect of the server; empty without keys."""
        return self.keyring.pair.public if self.keyring else ""

    def refresh(self) -> None:
        """Ask whether the list changed, and take it over when the answer comes. Does not wait."""
        if self.keyring is not None:
            self._client.submit(Keys(have=self.keyring.generation)).add_done_callback(self._learnt)

    def follow(self, every_s: float) -> None:
        """Refresh from a thread of its own until `close`; for who has no heartbeat to do it with."""
        threading.Thread(target=self._follow, args=(every_s,), name="weights-keys", daemon=True).start()

    def _follow(self, every_s: float) -> None:
        while not self._closing.wait(every_s):
            self.refresh()

    def close(self) -> None:
        """Follow no more."""
        self._closing.set()

    def _learnt(self, future: "Future[Reply]") -> None:
        if not future.cancelled() and future.exception() is None:
            self._take_over(future.result())

    def _take_over(self, reply: Reply) -> None:
        """A reply without a list says that ours is the newest."""
        if self.keyring is not None and isinstance(reply.message, KeysReply) and reply.bulk:
            self.keyring.learn(reply.message.generation, reply.bulk[0])

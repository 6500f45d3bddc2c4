"""The XPUB socket on which the broker tells its subscribers what changed."""

import logging
import time

import zmq

from slimebus.bus import envelope
from slimebus.bus.errors import UsageError
from slimebus.bus.messages import Hint
from slimebus.bus.transport.server import REBIND_S, Server, bind_socket, has_input

log = logging.getLogger("slimebus.broker")

MAX_HINTS = 16
"""Hints that wait for a subscriber that reads none; more are dropped, as hints may be."""
SUBSCRIBE_ALL = b"\x01"
MAX_STRANGE_BYTES = 64 * 1024
"""Of subscriptions to anything but everything, which nobody has a use for."""
MAX_SUBSCRIPTION_BYTES = 4096
"""Of a subscription, and of the commands of a CURVE handshake, which have some hundred bytes."""


MAX_ASKED, GREET_S = 256, 0.5
"""Subscriptions looked at in a turn; the last hint is published again at most so often, however many come."""


class HintPublisher:
    """Publishes hints at `endpoint`, beside a server, with its keys. Raises UsageError for an address that cannot be bound.

    earlier: where the broker before this one published; taken again when `address` leaves the port open and it is free, so that its
    subscribers need not look for another. last: the hint that a new subscriber hears again.
    """

    def __init__(self, server: Server, address: str, *, earlier: str = "") -> None:
        self._server, self.last = server, Hint()
        self._has_new, self._greets_at = False, 0.0
        keeps_port = address.endswith(":0") and earlier.rpartition(":")[0] == address.replace("localhost", "127.0.0.1").rpartition(":")[0]
        try:
            self._open(earlier if keeps_port else address)
        except UsageError:
            if not keeps_port:
                raise
            self._open(address)

    def _open(self, address: str, *, patience_s: float = 0.0) -> None:
        self._socket = self._server.context.socket(zmq.XPUB)
        self._socket.linger = 200
        self._socket.sndhwm, self._socket.rcvhwm, self._socket.maxmsgsize = MAX_HINTS, MAX_HINTS, MAX_SUBSCRIPTION_BYTES
        self._socket.xpub_verbose = True  # else libzmq tells of the first of all subscribers alone
        self._strange_bytes = 0
        self._server.authenticator.guard(self._socket)
        try:
            self.endpoint = bind_socket(self._socket, address, patience_s=patience_s)
        except UsageError:
            self.close()
            raise

    def reopen(self) -> None:
        """Have every subscriber come again: libzmq keeps topics and rights as long as a socket."""
        self.close()
        self._open(self.endpoint, patience_s=REBIND_S)

    def publish(self, hint: Hint) -> None:
        """Send a hint to all subscribers."""
        self.last = hint
        try:
            self._socket.send(envelope.encode(hint, id=0, run=self._server.run, sender="broker"), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("hint not sent: a subscriber is slow")

    def greet_subscribers(self) -> None:
        """Whoever subscribes hears the last hint again, so that a late joiner need not wait for the next."""
        for _ in range(MAX_ASKED):
            if self._strange_bytes > MAX_STRANGE_BYTES or not has_input(self._socket):
                break
            asked = self._socket.recv(zmq.NOBLOCK)
            self._has_new = asked == SUBSCRIBE_ALL or self._has_new
            self._strange_bytes += len(asked) - 1
        if self._strange_bytes > MAX_STRANGE_BYTES:
            self._server.refused["subscriptions"] += 1
            self.reopen()
        if self._has_new and self.last.lineage and time.monotonic() >= self._greets_at:
            self._has_new, self._greets_at = False, time.monotonic() + GREET_S
            self.publish(self.last)

    def close(self) -> None:
        """Release the address."""
        self._server.authenticator.unguard(self._socket)
        self._socket.close()

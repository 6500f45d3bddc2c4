"""A DEALER socket to one server: encrypted where there are keys, and opened anew after a refused handshake, with the reason."""

import logging
import random
import time
from typing import Any, NamedTuple

import zmq

from slimebus.bus.transport.curve import CLIENT_EVENTS, close_dead_connections, end_watch, handshakes, refusal, watch_handshakes
from slimebus.security.credentials import Credentials
from slimebus.security.key_file import KeyPair

log = logging.getLogger("slimebus.transport")

REOPEN_S = 0.5
"""Before the second connection after a refusal; four times as long from the fourth on."""


class ServerKey(NamedTuple):
    """What Credentials are without a file: our pair, and the one public key to expect of the server."""

    pair: KeyPair
    server: str

    @property
    def path(self) -> str:
        """For people."""
        return f"({self.pair.public})"

    def after_refusal(self) -> None:
        """There is no other key to try."""


class Dealer:
    """The connection that one thread uses; `follow` is called after each wait for `socket` and `monitor`.

    refusal: why the server did not take us in when the last handshake failed; empty otherwise. num_connections: made so far, so that a
    caller sees what it sent through an earlier one.
    """

    def __init__(
        self, context: Any, address: str, *, peer: str, identity: bytes, credentials: Credentials | ServerKey | None, max_bytes: int = -1
    ) -> None:
        """Raises ZMQError, or ValueError, for no address. max_bytes: a server that sends a larger frame is disconnected."""
        self._context, self.address, self.peer, self.identity, self.credentials = context, address, peer, identity, credentials
        self._max_bytes = max_bytes
        self.refusal, self._num_refusals, self.reopen_at = "", 0, float("inf")
        self.num_connections = 0
        self._open()

    def _open(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.identity, self.socket.sndhwm, self.socket.rcvhwm = self.identity, 4096, 4096
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 1000
        self.socket.maxmsgsize = self._max_bytes
        self.monitor = watch_handshakes(self.socket, CLIENT_EVENTS | zmq.EVENT_DISCONNECTED)
        self.is_connected = False
        self._connect(self.socket, self.address)

    def _connect(self, socket: Any, address: str) -> None:
        socket.linger = 0
        socket.ipv6 = "[" in address
        close_dead_connections(socket)
        if (key := self.credentials) is not None:
            socket.curve_serverkey = key.server.encode()
            socket.curve_publickey, socket.curve_secretkey = key.pair.public.encode(), key.pair.secret.encode()
        socket.connect(address.replace("localhost", "127.0.0.1"))

    def subscribe(self, address: str) -> Any:
        """A new SUB socket for everything published at an address, with the same key."""
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._connect(socket, address)
        return socket

    def follow(self) -> None:
        """Note what became of handshakes; a refused connection is made anew, for libzmq does not try again by itself."""
        self.note_handshakes()
        if time.monotonic() >= self.reopen_at:
            if self.credentials is not None:
                self.credentials.after_refusal()
            self.reopen()

    def note_handshakes(self) -> None:
        """Whether the server took us in, and else why not."""
        for event, value in handshakes(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.refusal, self._num_refusals, self.reopen_at = "", 0, float("inf")
                self.is_connected, self.num_connections = True, self.num_connections + 1
            elif event == zmq.EVENT_DISCONNECTED:
                self.is_connected = False
            elif self.reopen_at == float("inf"):
                self._note_refusal(event, value)

    def reopen(self) -> None:
        """Another connection in the place of this one."""
        self.reopen_at = float("inf")
        self.close()
        self._open()

    def _note_refusal(self, event: int, value: int) -> None:
        self._num_refusals += 1
        text = refusal(event, value, server=self.peer, key=str(self.credentials.path) if self.credentials else "")
        if self.refusal and event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:  # it says less: who closes first is left to chance
            text = self.refusal
        if text != self.refusal:
            log.log(logging.WARNING if self._num_refusals > 1 else logging.DEBUG, "%s: %s", self.address, text)
        self.refusal = text
        self.reopen_at = time.monotonic() + random.uniform(0.5, 1.0) * REOPEN_S * (1 if self._num_refusals < 4 else 4)

    def close(self) -> None:
        """Close the socket and its monitor."""
        end_watch(self.socket, self.monitor)
        self.socket.close()

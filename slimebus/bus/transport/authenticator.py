"""The thread that decides who may connect: libzmq asks it (ZAP, rfc.zeromq.org/spec/27) about each new connection.

    connection -> handshake -> [version, id, domain, address, identity, mechanism, key] -> 200 user id | 400 | 500

The user id of a connection is its public key: every frame received carries it (`User-Id`), so each message is judged by the
key that signed it, for any name or socket identity that it claims. A key that is revoked loses the right to be heard at its next message.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from slimebus.bus.transport.curve import (
    FULL,
    REFUSED,
    SERVER_EVENTS,
    ZAP_DOMAIN,
    close_dead_connections,
    end_watch,
    handshakes,
    serve_curve,
    watch_handshakes,
)
from slimebus.security.keyring import Keyring

log = logging.getLogger("slimebus.transport")

ZAP_ADDRESS = "inproc://zeromq.zap.01"
REFRESH_S = 1.0
HANDSHAKE_S = 10.0
"""A connection that has not said by then who it is, is closed."""
LATE_EVENT_S = 1.0
"""For this long a connection that asks waits for libzmq's event of its acceptance."""


class _Watched(NamedTuple):
    """A guarded socket, its monitor, and the file descriptors of its connections with the time when each was accepted."""

    socket: Any
    monitor: Any
    open: dict[int, float]


class ConnectionAuthenticator:
    """Answers ZAP for one context. keyring None: anyone may connect, up to `max_connections`.

    Those in their handshake take no place of these: who opens thousands of connections and says nothing keeps nobody out.

    refused: connections turned away, by reason.
    """

    def __init__(self, context: Any, keyring: Keyring | None, *, max_connections: int, refused: Counter[str]) -> None:
        self.keyring, self.max_connections, self.refused = keyring, max_connections, refused
        self._watched: list[_Watched] = []
        self._admitted_at = deque[float]()
        self._num_accepted, self._num_asked = 0, 0
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(ZAP_ADDRESS)
        self._lock = threading.Lock()
        self._wake_r, self._wake_w = os.pipe()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="authenticator", daemon=True)
        self._thread.start()

    @property
    def num_connections(self) -> int:
        """Connections of the guarded sockets that are open now, those in their handshake included."""
        with self._lock:
            return sum(len(watched.open) for watched in self._watched)

    @property
    def num_admitted(self) -> int:
        """Open connections that have said who they are, or a few more. libzmq does not tell which of the young ones those are."""
        young_since = time.monotonic() - HANDSHAKE_S
        with self._lock:
            while self._admitted_at and self._admitted_at[0] < young_since:
                self._admitted_at.popleft()
            times = [at for watched in self._watched for at in watched.open.values()]
            return min(len(times), len(self._admitted_at) + sum(at < young_since for at in times))

    def guard(self, socket: Any) -> None:
        """Have connections to this socket asked about, counted, and closed when they are dead or say nothing; before it is bound."""
        close_dead_connections(socket)
        socket.handshake_ivl = round(1000 * HANDSHAKE_S)
        socket.zap_domain = ZAP_DOMAIN
        if self.keyring is not None:
            serve_curve(socket, self.keyring.pair)
        with self._lock:
            self._watched.append(_Watched(socket, watch_handshakes(socket, SERVER_EVENTS), {}))

    def unguard(self, socket: Any) -> None:
        """Forget a socket that is about to be closed."""
        with self._lock:
            for watched in self._watched:
                if watched.socket is socket:
                    end_watch(socket, watched.monitor)
            self._watched = [watched for watched in self._watched if watched.socket is not socket]

    def close(self) -> None:
        """Stop; before the guarded sockets are closed."""
        self._closing.set()
        os.write(self._wake_w, b"!")
        self._thread.join(5.0)
        for watched in list(self._watched):
            self.unguard(watched.socket)
        self._zap.close()
        os.close(self._wake_r)
        os.close(self._wake_w)

    # --- the thread ---

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        refreshed_at = time.monotonic()
        while not self._closing.is_set():
            poller.poll(round(1000 * REFRESH_S))
            self._count()
            with contextlib.suppress(zmq.Again):
                while not self._closing.is_set():
                    asked = self._zap.recv_multipart(zmq.NOBLOCK)
                    self._num_asked += 1
                    self._count_the_one_that_asks()
                    self._zap.send_multipart(self._decide(asked))
            if self.keyring is not None and time.monotonic() - refreshed_at >= REFRESH_S:
                self.keyring.refresh()
                refreshed_at = time.monotonic()

    def _count_the_one_that_asks(self) -> None:
        """Count, after the event of the connection that asks. Its own IO thread may ask before another one tells of the connection."""
        deadline = time.monotonic() + LATE_EVENT_S
        self._count()
        while self._num_accepted < self._num_asked and time.monotonic() < deadline and not self._closing.wait(0.001):
            self._count()
        self._num_asked = min(self._num_asked, self._num_accepted)  # events are lost with a socket that is closed

    def _count(self) -> None:
        with self._lock:
            told = [(watched.open, *event) for watched in self._watched for event in handshakes(watched.monitor)]
            for connections, event, value in told:
                if event == zmq.EVENT_ACCEPTED:
                    connections[value] = time.monotonic()
                    self._num_accepted += 1
                elif event == zmq.EVENT_DISCONNECTED:
                    connections.pop(value, None)
                elif event != zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # that is our own doing, counted by reason
                    self.refused["handshake"] += 1

    def _decide(self, asked: list[bytes]) -> list[bytes]:
        version, request, _, address, _, mechanism, *keys = [*asked, *[b""] * (6 - len(asked))]
        if self.num_connections > self.max_connections <= self.num_admitted:  # who asks is one of those that are open
            self._turn_away("max_connections", address, f"{self.max_connections} connections are open (broker.max_clients)")
            return [version, request, b"%d" % FULL, b"no room", b"", b""]
        public = z85.encode(keys[0]) if mechanism == b"CURVE" and len(keys) == 1 and len(keys[0]) == 32 else b""
        if self.keyring is not None and public.decode() not in self.keyring.grants:
            self._turn_away("unknown_key", address, f"the key {public.decode() or 'it did not give'} is not on the allow-list")
            return [version, request, b"%d" % REFUSED, b"not allowed", b"", b""]
        with self._lock:
            self._admitted_at.append(time.monotonic())
        return [version, request, b"200", b"OK", public, b""]

    def _turn_away(self, reason: str, address: bytes, text: str) -> None:
        self.refused[reason] += 1
        log.warning("connection from %s refused: %s (%d times so far)", address.decode(errors="replace"), text, self.refused[reason])

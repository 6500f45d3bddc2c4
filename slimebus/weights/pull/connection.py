"""A puller's connection to one weight server: a blocking DEALER, because bulk data does not belong on an event loop."""

import contextlib
import logging
import random
import secrets
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import zmq

from slimebus.bus import envelope
from slimebus.bus.errors import FatalWeightsError, SlimebusError, Unreachable
from slimebus.bus.messages import Error, Message
from slimebus.bus.transport.dealer import Dealer, ServerKey
from slimebus.security.exposure import is_local
from slimebus.security.key_file import KeyPair
from slimebus.weights.messages import TYPES

log = logging.getLogger("slimebus.weights")

MAX_BURST = 64
KEY_MARK = "?key="
MAX_FRAME_BYTES = 1 << 28
"""The largest thing a server sends is a manifest, 240 bytes a tensor; who sends more is disconnected before it is taken in."""
MAX_PATIENCE = 8
"""How many stall times a connection that is slow, or dead, is waited for at most."""
MANIFEST_STALLS = 3
"""A manifest may take a merge of several versions: it is waited for this many times as long as a chunk."""


def with_key(address: str, public: str) -> str:
    """The address of a weight server as it is announced: with its public key, where it has one."""
    return f"{address}{KEY_MARK}{public}" if public else address


Answer = tuple[int, Message | SlimebusError, list[memoryview]]
"""The id of a request, and its reply or the error it carried. Bulk frames are buffers of the message, not copies."""


class WeightServerConnection:
    """Requests to one endpoint, used by one thread. What does not parse, or answers nothing, is counted in `refused` and ignored.

    stall_s: silence after which the connection is taken for lost; twice as long after each time that a new one was silent too.
    endpoint: tcp://HOST:PORT, with `?key=` and the server's public key where it has one; then `pair` is the key to show there.
    """

    def __init__(self, endpoint: str, *, name: str, stall_s: float, pair: KeyPair | None = None) -> None:
        self.endpoint, _, server_key = endpoint.partition(KEY_MARK)
        if server_key and pair is None:
            raise FatalWeightsError(f"the weight server at {self.endpoint} takes nobody without a key; give the folder of keys with --keys")
        self._name, self.stall_s = name, stall_s
        self._open: set[int] = set()
        self._patience = 1
        self.refused: Counter[str] = Counter()
        self._next_id = 0
        key = ServerKey(pair, server_key) if pair is not None and server_key else None
        identity, context = f"{name}/{secrets.token_hex(4)}".encode(), zmq.Context()
        try:
            self.dealer = Dealer(
                context, self.endpoint, peer="weight server", identity=identity, credentials=key, max_bytes=MAX_FRAME_BYTES
            )
        except (zmq.ZMQError, ValueError) as bad:
            context.destroy(0)
            raise FatalWeightsError(f"{self.endpoint[:200]!r} is no address of a weight server: {bad}") from None
        # Left to the collector, a context would wait for its sockets for ever, in whichever thread that happens to be.
        self.close = weakref.finalize(self, _end, context, self.dealer)
        """Closing again does nothing."""
        self.close.atexit = False
        self.listen()

    def send(self, message: Message) -> int:
        """Send a request and return its id."""
        self._next_id += 1
        header = envelope.encode(message, id=self._next_id, sender=self._name)
        if not self._open:
            self.listen()  # before, there was nothing to say
        self._open.add(self._next_id)
        with contextlib.suppress(zmq.Again):  # the queue to a server that is away is full: a stall, after which all is sent again
            self.dealer.socket.send(header, zmq.NOBLOCK)
        return self._next_id

    def receive(self, timeout_s: float) -> list[Answer]:
        """The answers that came; waits at most timeout_s for the first."""
        answers: list[Answer] = []
        if self.dealer.socket.poll(round(timeout_s * 1000)):
            with contextlib.suppress(zmq.Again):
                while len(answers) < MAX_BURST:
                    frames = self.dealer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    answers += self._parse([frame.buffer for frame in frames])
        return answers

    def _parse(self, frames: list[memoryview]) -> list[Answer]:
        """Only answers to a request reset the stall timer."""
        try:
            got = envelope.decode(frames, TYPES)
        except SlimebusError as bad:
            self.refused[bad.code] += 1
            return []
        if got.header.id not in self._open:
            self.refused["unasked"] += 1
            return []
        self._open.discard(got.header.id)
        if self._silent_s < self.stall_s:
            self._patience = 1
        self.listen()
        message = envelope.problem_of(got.message, self.endpoint) if isinstance(got.message, Error) else got.message
        return [(got.header.id, message, list(got.bulk))]

    def ask(self, message: Message, deadline: float, cancelled: threading.Event) -> tuple[Message, list[memoryview]]:
        """One request and its answer, sent again on a new connection after each silence. Raises Unreachable at the deadline."""
        started = time.monotonic()
        wanted = self.send(message)
        while time.monotonic() < deadline and not cancelled.is_set():
            for request_id, answer, bulk in self.receive(0.2):
                if request_id == wanted:
                    if isinstance(answer, SlimebusError):
                        raise answer
                    return answer, bulk
            if self._silent_s > MANIFEST_STALLS * self._patience_s:
                self.reconnect()
                wanted = self.send(message)
        silent = f"no answer from the weight server at {self.endpoint} in {time.monotonic() - started:.0f} s"
        raise Unreachable(f"{silent}; {self.dealer.refusal or self._advice}")

    @property
    def _advice(self) -> str:
        if not is_local(self.endpoint):
            return "is the trainer running?"
        return "is the trainer running, on this machine? On another it must have a weights.weights_bind that this one reaches"

    def listen(self) -> None:
        """Silence counts from now."""
        self._heard_at, self._jitter = time.monotonic(), random.uniform(0.8, 1.2)

    @property
    def is_stalled(self) -> bool:
        """Nothing was heard for the stall time; the caller decides whether it was waiting for something."""
        return self._silent_s > self._patience_s

    @property
    def _patience_s(self) -> float:
        return self.stall_s * self._jitter * self._patience

    @property
    def _silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def reconnect(self) -> None:
        """A new connection; requests that were under way are lost."""
        self._patience = min(2 * self._patience, MAX_PATIENCE)
        self._open.clear()
        self.dealer.note_handshakes()
        log.info("no word from the weight server at %s for %.0f s; %s", self.endpoint, self._silent_s, self.dealer.refusal or self._advice)
        self.dealer.reopen()
        self.listen()


def _end(context: Any, dealer: Dealer) -> None:
    dealer.close()
    context.term()


def wait_for_any(connections: Sequence[WeightServerConnection], timeout_s: float) -> None:
    """Return when something has come on one of the connections, or after timeout_s seconds."""
    poller = zmq.Poller()
    for connection in connections:
        poller.register(connection.dealer.socket, zmq.POLLIN)
    poller.poll(round(1000 * timeout_s))

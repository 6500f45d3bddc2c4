"""A puller's connection to one weight server: a blocking DEALER, because bulk data does not belong on an event loop.

The chunks of a pull on their way through it: asked for, put in their places, asked for again.

downloads --cut--> chunks --`credits` of them in flight--> replies --> bytes in their places --> complete downloads
                ^------ later, busy, silence -----------'
"""

import contextlib
import logging
import random
import secrets
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq

from slimebus.bus import envelope
from slimebus.bus.errors import FatalWeightsError, SlimebusError, Unreachable
from slimebus.bus.messages import Error, Message
from slimebus.bus.transport.dealer import Dealer, ServerKey
from slimebus.security.exposure import is_local
from slimebus.security.key_file import KeyPair
from slimebus.weights.messages import TYPES, ChunkReply, ChunkRequest, Piece
from slimebus.weights.pull.plan import TensorDownload
from slimebus.weights.pull.pull_loop import RetryPull
from slimebus.weights.tensors import Target

log = logging.getLogger("slimebus.weights")

MAX_BURST = 64
KEY_MARK = "?key="
MAX_FRAME_BYTES = 1 << 28
"""The largest thing a server sends is a manifest, 240 bytes a tensor; who sends more is disconnected before it is taken in."""
MAX_PATIENCE = 8
"""How many stall times a connection that is slow, or dead, is waited for at most."""
MANIFEST_STALLS = 3
"""A manifest may take a merge of several versions: it is waited for this many times as long as a chunk."""
MAX_PIECES = 64
LATER_STALLS = 10
"""A source that only answers `later` for this many stall times is dropped."""
BEGIN_S = 1.0
"""So long a source that has not asked for the version yet, and sends nothing, is waited for."""
LATER_PAUSE_S = 0.02
BUSY = "busy"
"""The error of a server that has too much on its way to others already; as good as `later`."""


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


class BadSource(RetryPull):
    """A worker failed as a source of payloads; its publisher has them too. is_past: it may serve newer versions."""

    def __init__(self, source: str, why: str, *, is_past: bool = False) -> None:
        super().__init__(f"worker {source} {why}; its publisher is asked")
        self.source, self.is_past = source, is_past


class Chunk(NamedTuple):
    """One request and where the bytes of its answer belong: download, offset, length of each piece."""

    request: ChunkRequest
    places: list[tuple[TensorDownload, int, int]]


def chunks(downloads: Sequence[TensorDownload], target: Target, chunk_bytes: int) -> Iterator[Chunk]:
    """The downloads cut into requests of chunk_bytes; small payloads share one."""
    places: list[tuple[TensorDownload, int, int]] = []
    room = chunk_bytes
    for download in downloads:
        offset, size = 0, download.missing_bytes
        while offset < size:
            length = min(room, size - offset)
            places.append((download, offset, length))
            offset, room = offset + length, room - length
            if room == 0 or len(places) == MAX_PIECES:
                yield _chunk(places, target)
                places, room = [], chunk_bytes
    if places:
        yield _chunk(places, target)


def _chunk(places: list[tuple[TensorDownload, int, int]], target: Target) -> Chunk:
    pieces = [Piece(download.entry.name, download.base_version, offset, length) for download, offset, length in places]
    return Chunk(ChunkRequest(lineage=target.lineage, version=target.version, pieces=pieces), places)


class Stream:
    """The chunks of the downloads of one connection, in flight."""

    def __init__(
        self, connection: WeightServerConnection, downloads: Sequence[TensorDownload], chunks: Iterator[Chunk], credits: int
    ) -> None:
        self.connection, self.downloads, self._chunks, self._credits = connection, downloads, chunks, credits
        self.source = downloads[0].source if downloads else ""
        self.pending: dict[int, Chunk] = {}
        self._later: deque[tuple[float, Chunk]] = deque()
        self._useful_at = time.monotonic()
        self.gone = ""

    def fill(self, *, more: bool) -> bool:
        """Send requests up to the credits, if any more; False when nothing is left to send or to wait for."""
        if not self.pending:
            self.connection.listen()
        while self._later and self._later[0][0] <= time.monotonic():
            self._send(self._later.popleft()[1])
        while more and len(self.pending) + len(self._later) < self._credits:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._send(chunk)
        return bool(self.pending or self._later)

    @property
    def quiet_s(self) -> float:
        """Since something useful came."""
        return time.monotonic() - self._useful_at

    @property
    def missing_text(self) -> str:
        """For people: what has not come, and from which source."""
        total, missing = sum(download.size for download in self.downloads), sum(download.missing_bytes for download in self.downloads)
        problem = f": {self.connection.dealer.refusal}" if self.connection.dealer.refusal else ""
        return f"{self.connection.endpoint} had not sent {missing} of {total} bytes, and nothing for {self.quiet_s:.1f} s{problem}"

    def _send(self, chunk: Chunk) -> None:
        self.pending[self.connection.send(chunk.request)] = chunk

    def _postpone(self, chunk: Chunk, patience_s: float) -> None:
        """The source has nothing yet; after `patience_s` seconds of that it counts as bad."""
        if self.source and self.quiet_s > patience_s:
            raise BadSource(self.source, f"has had nothing for {self.quiet_s:.0f} s")
        self._later.append((time.monotonic() + LATER_PAUSE_S, chunk))

    def receive(self, counts: Counter[str]) -> list[TensorDownload]:
        """The downloads that the replies which are here complete; reconnects and asks again after a silence."""
        complete: list[TensorDownload] = []
        for request_id, message, bulk in self.connection.receive(0):
            chunk = self.pending.pop(request_id, None)
            if chunk is None:
                continue
            if isinstance(message, ChunkReply) and not message.later:
                complete += self._take(chunk, message, bulk, counts)
            elif isinstance(message, ChunkReply):
                self._postpone(chunk, LATER_STALLS * self.connection.stall_s if message.is_pulling else BEGIN_S)
            elif not isinstance(message, SlimebusError):
                raise self._wrong(f"answered a chunk request with {type(message).__name__}")
            elif message.code == BUSY:
                self._postpone(chunk, LATER_STALLS * self.connection.stall_s)
            elif message.retryable or self.source:
                raise self._wrong(f"answered: {message.text}")
            else:
                raise message
        if self.pending and self.connection.is_stalled:
            if self.source:
                raise BadSource(self.source, "does not answer")
            self.connection.reconnect()
            lost, self.pending = self.pending, {}
            for chunk in lost.values():
                self._send(chunk)
        return complete

    def _wrong(self, what: str) -> RetryPull:
        return BadSource(self.source, what) if self.source else RetryPull(f"{self.connection.endpoint} {what}")

    def _take(self, chunk: Chunk, reply: ChunkReply, bulk: Sequence[memoryview], counts: Counter[str]) -> list[TensorDownload]:
        """Put the pieces where they belong. A download with a piece that is gone never completes."""
        complete: list[TensorDownload] = []
        gone = set(reply.gone)
        expected = [0 if index in gone else place[2] for index, place in enumerate(chunk.places)]
        if [len(frame) for frame in bulk] != expected:
            raise self._wrong("answered a chunk request with other pieces than asked for")
        for index, ((download, offset, length), frame) in enumerate(zip(chunk.places, bulk, strict=True)):
            if index in gone:
                self.gone = download.entry.name
                continue
            self._useful_at = time.monotonic()
            download.write(offset, frame)
            counts["received_bytes"] += length
            if not download.missing_bytes:
                complete.append(download)
        return complete

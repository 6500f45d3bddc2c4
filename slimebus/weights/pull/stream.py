"""The chunks of a pull on their way through one connection: asked for, put in their places, asked for again.

downloads --cut--> chunks --`credits` of them in flight--> replies --> bytes in their places --> complete downloads
                ^------ later, busy, silence -----------'
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from slimebus.bus.errors import SlimebusError
from slimebus.weights.messages import ChunkReply, ChunkRequest, Piece
from slimebus.weights.pull.connection import WeightServerConnection
from slimebus.weights.pull.plan import TensorDownload
from slimebus.weights.pull.pull_loop import RetryPull
from slimebus.weights.tensors import Target

MAX_PIECES = 64
LATER_STALLS = 10
"""A source that only answers `later` for this many stall times is dropped."""
BEGIN_S = 1.0
"""So long a source that has not asked for the version yet, and sends nothing, is waited for."""
LATER_PAUSE_S = 0.02
BUSY = "busy"
"""The error of a server that has too much on its way to others already; as good as `later`."""


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
                complete += self._place_pieces(chunk, message, bulk, counts)
            elif isinstance(message, ChunkReply):
                self._postpone(chunk, LATER_STALLS * self.connection.stall_s if message.is_pulling else BEGIN_S)
            elif not isinstance(message, SlimebusError):
                raise self._wrong_answer(f"answered a chunk request with {type(message).__name__}")
            elif message.code == BUSY:
                self._postpone(chunk, LATER_STALLS * self.connection.stall_s)
            elif message.retryable or self.source:
                raise self._wrong_answer(f"answered: {message.text}")
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

    def _wrong_answer(self, what: str) -> RetryPull:
        return BadSource(self.source, what) if self.source else RetryPull(f"{self.connection.endpoint} {what}")

    def _place_pieces(self, chunk: Chunk, reply: ChunkReply, bulk: Sequence[memoryview], counts: Counter[str]) -> list[TensorDownload]:
        """Put the pieces where they belong. A download with a piece that is gone never completes."""
        complete: list[TensorDownload] = []
        gone = set(reply.gone)
        expected = [0 if index in gone else place[2] for index, place in enumerate(chunk.places)]
        if [len(frame) for frame in bulk] != expected:
            raise self._wrong_answer("answered a chunk request with other pieces than asked for")
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

"""Serves the versions of a store to pullers, from one thread that never waits for a merge.

    puller --manifest_request--> thread --(merge)--> encoder thread --> manifest_reply
    puller --chunk_request-----> thread --> chunk_reply with frames that point into the store: nothing is copied

Credits are the puller's: it never has more unanswered chunk requests than it can take, so the server keeps no queue of its own.
"""

import logging
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
import zmq

from slimebus.envelope import error_reply
from slimebus.errors import SlimebusError, WeightsError
from slimebus.security.keyring import Keyring
from slimebus.transport.server import Request, Server
from slimebus.weights.fanout import Fanout
from slimebus.weights.messages import (
    BAD_CHUNK,
    MAX_CHUNK_BYTES,
    MAX_PIECES,
    TYPES,
    ChunkReply,
    ChunkRequest,
    Manifest,
    ManifestReply,
    ManifestRequest,
    VersionGone,
)
from slimebus.weights.onward import NotBegun, NotYet, Onward
from slimebus.weights.store import slice_payload

log = logging.getLogger("slimebus.weights")

MAX_REQUEST_BYTES = 1 << 20
MAX_ADDRESS_BYTES = 512
"""Of a worker that passes payloads on: it is told to others."""
MAX_WAITING = 4096
"""Requests that wait for a payload that is on its way; the credits of some hundred pullers."""
LATER_S = 1.0
"""After this long a waiting request is told `later`, so that its puller knows that someone is here."""


class Versions(Protocol):
    """What a server serves: a publisher's VersionStore, or whoever holds verified versions of one."""

    def manifest(self, have_lineage: str, have_version: int, want: int) -> Manifest: ...

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview: ...


class WeightServer:
    """Answers pullers until `close`. endpoint: the address it got (port 0 binds any free port).

    degree: how many workers pull from this server when they pass on what they have; the others pull from them. 0: all from here.
    keyring: whose keys may pull; None: anyone.
    """

    def __init__(
        self,
        store: Versions,
        bind: str = "tcp://127.0.0.1:0",
        *,
        degree: int = 0,
        name: str = "weights",
        keyring: Keyring | None = None,
    ) -> None:
        self._store, self._fanout = store, Fanout(degree) if degree else None
        self._waiting: deque[tuple[float, Request]] = deque()
        self._server = Server(bind, name=name, types=TYPES, max_message_bytes=MAX_REQUEST_BYTES, keyring=keyring)
        self.endpoint = self._server.endpoint
        self.sent_bytes = 0
        self._encoder = ThreadPoolExecutor(1, "weights-manifest")
        self._done: queue.SimpleQueue[tuple[Request, Manifest | SlimebusError]] = queue.SimpleQueue()
        self._wake_r, self._wake_w = os.pipe()
        self._closing = threading.Event()
        if isinstance(store, Onward):
            store.when_more = self._wake
        self._thread = threading.Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    @property
    def refused(self) -> Counter[str]:
        """Messages refused, by error code."""
        return self._server.refused

    def close(self) -> None:
        """Stop serving and release the address. Pullers in the middle of a version wait for its return, or go elsewhere."""
        if self._closing.is_set():
            return
        self._closing.set()
        if isinstance(self._store, Onward):
            self._store.when_more = lambda: None
        self._wake()
        self._thread.join(timeout=10.0)
        self._encoder.shutdown(wait=True)
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _wake(self) -> None:
        os.write(self._wake_w, b"!")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._server.socket, zmq.POLLIN)
        poller.register(self._wake_r, zmq.POLLIN)
        while not self._closing.is_set():
            ready = dict(poller.poll(round(1000 * LATER_S / 4) if self._waiting else 5000))
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
                self._send_manifests()
            self._try_waiting()
            for request in self._server.receive(0):
                self._answer(request)
        self._server.close()

    def _answer(self, request: Request) -> None:
        message = request.message
        try:
            if isinstance(message, ManifestRequest):
                self._encoder.submit(self._make_manifest, message).add_done_callback(self._when_made(request))
            elif isinstance(message, ChunkRequest):
                self._send_chunk(request, message)
            else:
                raise WeightsError(f"a weight server answers no {type(message).__name__}", code="unexpected", retryable=False)
        except SlimebusError as problem:
            self._refuse(request, problem)

    def _send_chunk(self, request: Request, message: ChunkRequest, until: float = 0.0) -> None:
        """Answer with the pieces; while one of them is on its way here, or may be soon, have the request wait, for LATER_S at most."""
        now = time.monotonic()
        try:
            frames, gone = self._read(message, is_last_try=bool(until) and now >= until)
        except (NotYet, NotBegun):
            if len(self._waiting) >= MAX_WAITING or (until and now >= until):
                self._server.reply(request, ChunkReply(later=True))
            else:
                self._waiting.append((until or now + LATER_S, request))
            return
        self.sent_bytes += sum(len(frame) for frame in frames)
        self._server.reply(request, ChunkReply(gone=gone), frames)

    def _try_waiting(self) -> None:
        """Answer what can be answered by now. A peer asks in the order of the payloads: while its first request waits, so do the rest."""
        now, held_up = time.monotonic(), set()
        for _ in range(len(self._waiting)):
            until, request = self._waiting.popleft()
            if request.peer in held_up and now < until:
                self._waiting.append((until, request))
                continue
            num_waiting = len(self._waiting)
            try:
                assert isinstance(request.message, ChunkRequest)
                self._send_chunk(request, request.message, until)
            except SlimebusError as problem:
                self._refuse(request, problem)
            if len(self._waiting) > num_waiting:
                held_up.add(request.peer)

    def _refuse(self, request: Request, problem: SlimebusError) -> None:
        self.refused[problem.code] += 1
        self._server.reply(request, error_reply(problem))

    def _read(self, request: ChunkRequest, *, is_last_try: bool) -> tuple[list[memoryview], list[int]]:
        """The bytes of the pieces, and the indices of those that are gone."""
        if len(request.pieces) > MAX_PIECES or sum(max(0, piece.length) for piece in request.pieces) > MAX_CHUNK_BYTES:
            limits = f"{MAX_PIECES} pieces and {MAX_CHUNK_BYTES} bytes"
            raise WeightsError(f"chunk of {len(request.pieces)} pieces; at most {limits}", code=BAD_CHUNK, retryable=False)
        frames, gone = [], []
        for index, piece in enumerate(request.pieces):
            try:
                payload = self._store.read(request.lineage, request.version, piece.name, piece.base)
                frames.append(slice_payload(payload, piece.offset, piece.length, piece.name))
            except VersionGone as gone_here:
                if isinstance(gone_here, NotBegun) and not is_last_try:
                    raise
                frames.append(memoryview(b""))
                gone.append(index)
        self.refused[VersionGone.code] += len(gone)
        return frames, gone

    # --- manifests: made in the encoder thread, sent by the serving one ---

    def _make_manifest(self, message: ManifestRequest) -> Manifest:
        if len(message.serves) > MAX_ADDRESS_BYTES or (message.serves and not message.serves.startswith("tcp://")):
            raise WeightsError(f"worker serves at {message.serves[:80]!r}; expected tcp://HOST:PORT", code="bad_address", retryable=False)
        manifest = self._store.manifest(message.have_lineage, message.have_version, message.want)
        if self._fanout is not None and manifest.base != manifest.version:
            version = (manifest.lineage, manifest.version)
            source = self._fanout.source(version, manifest.base, message.serves, message.avoid)
            manifest.sources = [source] if source else []
        return manifest

    def _when_made(self, request: Request) -> Callable[["Future[Manifest]"], None]:
        def done(future: "Future[Manifest]") -> None:
            if future.cancelled():
                return
            problem = future.exception()
            if problem is not None and not isinstance(problem, SlimebusError):
                log.error("manifest for peer %s: %r", request.peer.hex(), problem)
                problem = WeightsError(f"the server could not make the manifest: {type(problem).__name__}", code="internal")
            self._done.put((request, problem or future.result()))
            if not self._closing.is_set():
                self._wake()

        return done

    def _send_manifests(self) -> None:
        while not self._done.empty():
            request, made = self._done.get()
            if isinstance(made, SlimebusError):
                self._refuse(request, made)
                continue
            bulk: list[Any] = [msgspec.msgpack.encode(made)]
            self._server.reply(request, ManifestReply(lineage=made.lineage, version=made.version), bulk)

"""Serves versions to pullers, from one thread that never waits for a merge.

    puller --manifest_request--> thread --(merge)--> encoder thread --> manifest_reply
    puller --chunk_request-----> thread --> chunk_reply with frames that point into the store: nothing is copied

Credits are the puller's: it never has more unanswered chunk requests than it can take, so the server keeps no queue of its own.
"""

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from slimebus.bus.envelope import error_reply
from slimebus.bus.errors import FatalWeightsError, SlimebusError, WeightsError
from slimebus.bus.messages import Message
from slimebus.bus.transport.server import Limits, Request, Server, describe
from slimebus.security.keyring import Keyring
from slimebus.weights.messages import (
    MAX_CHUNK_BYTES,
    TYPES,
    ChunkReply,
    ChunkRequest,
    Manifest,
    ManifestReply,
    ManifestRequest,
    VersionGone,
)
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE, Target


class NotYet(WeightsError):
    """This payload is on its way here, or may be soon. is_pulling: False where its version has not been asked for yet."""

    code = "not_yet"

    def __init__(self, text: str, *, is_pulling: bool) -> None:
        super().__init__(text)
        self.is_pulling = is_pulling


class RelayPayloads:
    """What a worker can pass on: the payloads of one version, each once it is verified. Filled by one puller, read by the server beside it.

    Nothing unverified leaves here, and pullers verify again by the publisher's hashes: a peer is trusted with nothing.
    """

    def __init__(self) -> None:
        self._target = Target("", NO_BASE)
        self._payloads: dict[tuple[str, int], memoryview] = {}
        self._expected: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def begin(self, target: Target, expected: Iterable[tuple[str, int]]) -> None:
        """A round pulls these payloads, (tensor, base), of this version; those of an older version are let go."""
        with self._lock:
            if target != self._target:
                self._target, self._payloads = target, {}
            self._expected = set(expected) - self._payloads.keys()

    def add(self, name: str, base: int, payload: memoryview) -> None:
        """A payload of the version is verified."""
        with self._lock:
            self._payloads[name, base] = payload
            self._expected.discard((name, base))

    def end(self) -> None:
        """Nothing more will come of this round: a request for anything else is answered as gone."""
        with self._lock:
            self._expected.clear()

    def manifest(self, have_lineage: str, have_version: int, want: int) -> Manifest:
        """Manifests, and with them hashes, come from the publisher only."""
        raise FatalWeightsError("a worker passes payloads on; ask the publisher for the manifest", code="no_manifest")

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        """A verified payload. Raises NotYet for one that may come, VersionGone for others."""
        with self._lock:
            if (lineage, version) == self._target:
                found = self._payloads.get((name, base))
                if found is not None:
                    return found
                if (name, base) in self._expected:
                    raise NotYet(f"tensor {name!r} of version {version} is on its way here", is_pulling=True)
            elif lineage != self._target.lineage or version > self._target.version:
                raise NotYet(f"version {version} is not pulled here yet", is_pulling=False)
        raise VersionGone(f"{name!r} of version {version} from base {base} is not passed on here")


MAX_WORKERS = 65536
MAX_TREES = 32


class Fanout:
    """Which worker a version is pulled from: the trees of one publisher for its newest versions. Not safe for several threads at once.

    The publisher serves the first `degree` workers, each serves the next `degree`, and so on: its link carries `degree` copies however
    many there are. Payloads lead from one base, so workers with different bases stand in different trees.

        publisher --> w0 --> w2, w3
                  --> w1 --> w4, w5 ...          (degree 2)
    """

    def __init__(self, degree: int = 2) -> None:
        self.degree = degree
        self._trees: dict[tuple[str, int, int], dict[str, int]] = {}

    def source(self, version: tuple[str, int], base: int, address: str, avoid: Collection[str] = ()) -> str:
        """Where the worker that serves at `address` shall pull `version` (lineage, number) from; empty: from the publisher.

        The same question gets the same answer for as long as the version is in use. avoid: sources that failed; a source above
        them is named instead. A worker that serves nobody (empty address) pulls from the last one that has a place for it.
        """
        tree = self._trees.setdefault((*version, base), {})
        if len(self._trees) > MAX_TREES:
            del self._trees[next(iter(self._trees))]
        if address and address not in tree and len(tree) < MAX_WORKERS:
            tree[address] = len(tree)
        place = tree.get(address, len(tree))
        above = list(tree)
        while (place := place // self.degree - 1) >= 0:
            if above[place] not in avoid and above[place] != address:
                return above[place]
        return ""


log = logging.getLogger("slimebus.weights")

MAX_REQUEST_BYTES = 1 << 20
MAKING_S, IDLE_S = 0.001, 0.1
"""How long the serving thread waits for a request: while a manifest is being made, and else."""


class WeightServer:
    """Answers pullers until `close`. endpoint: the address it got (port 0 binds any free port).

    degree: how many workers pull from this server when they pass on what they have; the others pull from them. 0: all from here.
    keyring: the keys that may pull; None: anyone. limits: every worker of the run keeps a connection.
    """

    def __init__(
        self, store: VersionStore | RelayPayloads, bind: str = "tcp://127.0.0.1:0", *, degree: int = 0, keyring: Keyring | None = None,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self._store, self._fanout = store, Fanout(degree) if degree else None
        self._server = Server(bind, name="weights", types=TYPES, max_message_bytes=MAX_REQUEST_BYTES, keyring=keyring, limits=limits)
        self.endpoint = self._server.endpoint
        self.refused = self._server.refused
        """Messages refused, by error code."""
        self.sent_bytes = 0
        self._encoder = ThreadPoolExecutor(1, "weights-manifest")
        self._asked: dict[bytes, tuple[Request, ManifestRequest]] = {}
        """Of each peer, the newest manifest request that is not begun: one that asks again takes no more memory, and no other's turn."""
        self._asking = threading.Lock()
        self._making: deque[Future[tuple[Request, Message, list[bytes]]]] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="weights-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and release the address. Pullers in the middle of a version wait for its return, or go elsewhere."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(timeout=10.0)
        self._encoder.shutdown(wait=True)

    def _serve(self) -> None:
        while not self._closing.is_set():
            self._server.wait(MAKING_S if self._making else IDLE_S)
            while self._making and self._making[0].done():
                self._server.reply(*self._making.popleft().result())
            for request in self._server.receive(0):
                self._answer(request)
        self._server.close()

    def _answer(self, request: Request) -> None:
        message = request.message
        try:
            if isinstance(message, ManifestRequest):
                with self._asking:
                    is_first = request.peer not in self._asked
                    self._asked[request.peer] = request, message
                if is_first:
                    self._making.append(self._encoder.submit(self._answer_manifest, request.peer))
            elif isinstance(message, ChunkRequest):
                frames, gone = self._read(message)
                self.sent_bytes += sum(len(frame) for frame in frames)
                self._server.reply(request, ChunkReply(gone=gone), frames)
            else:
                raise FatalWeightsError(f"a weight server answers no {type(message).__name__}", code="unexpected")
        except NotYet as coming:
            self._server.reply(request, ChunkReply(later=True, is_pulling=coming.is_pulling))
        except SlimebusError as problem:
            self._server.reply(request, error_reply(problem))

    def _read(self, request: ChunkRequest) -> tuple[list[memoryview], list[int]]:
        """The bytes of the pieces, and the indices of those that are gone."""
        if (size_bytes := sum(piece.length for piece in request.pieces)) > MAX_CHUNK_BYTES:
            raise FatalWeightsError(f"chunk of {size_bytes} bytes; at most {MAX_CHUNK_BYTES}", code="bad_chunk")
        frames, gone = [], []
        for index, piece in enumerate(request.pieces):
            try:
                payload = self._store.read(request.lineage, request.version, piece.name, piece.base)
                if piece.offset + piece.length > len(payload):
                    asked = f"bytes {piece.offset} to {piece.offset + piece.length} of {piece.name!r}, which has {len(payload)}"
                    raise FatalWeightsError(asked, code="bad_chunk")
                frames.append(payload[piece.offset : piece.offset + piece.length])
            except VersionGone:
                frames.append(memoryview(b""))
                gone.append(index)
        self.refused[VersionGone.code] += len(gone)
        return frames, gone

    # --- manifests: made in the encoder thread, sent by the serving one ---

    def _answer_manifest(self, peer: bytes) -> tuple[Request, Message, list[bytes]]:
        with self._asking:
            request, message = self._asked.pop(peer)
        try:
            return request, *self._make_manifest(message)
        except SlimebusError as problem:
            return request, error_reply(problem), []
        except Exception as problem:
            log.exception("manifest for %s", describe(request.peer))
            text = f"the server could not make the manifest: {type(problem).__name__}"
            return request, error_reply(WeightsError(text, code="internal")), []

    def _make_manifest(self, message: ManifestRequest) -> tuple[ManifestReply, list[bytes]]:
        manifest = self._store.manifest(message.have_lineage, message.have_version, message.want)
        source = ""
        if self._fanout is not None and manifest.base != manifest.version:
            source = self._fanout.source((manifest.lineage, manifest.version), manifest.base, message.serves, message.avoid)
        reply = ManifestReply(lineage=manifest.lineage, version=manifest.version, sources=[source] if source else manifest.sources)
        return reply, [manifest.encoded]

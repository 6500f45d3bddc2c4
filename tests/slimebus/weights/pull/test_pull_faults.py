"""Networks that break, crawl and trickle, publishers that rush, and peers that say anything but what was asked."""

import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from changed_store import changed
from slow_link import SlowLink
from waiting import wait_until

from slimebus.bus import envelope
from slimebus.bus.errors import WeightsError
from slimebus.bus.messages import Error, Message
from slimebus.weights.messages import TYPES, ChunkReply, ChunkRequest, Manifest, ManifestReply, ManifestRequest
from slimebus.weights.pull import connection as connection_module
from slimebus.weights.pull.connection import WeightServerConnection
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import Weights

MIB = 1 << 20


def noise(size_mib: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 65536, int(size_mib * MIB / 2)).astype(np.uint16)


def publish(closing: Any, tensors: dict[str, np.ndarray], **options: Any) -> tuple[VersionStore, WeightServer]:
    store = VersionStore(keep=4)
    store.publish(tensors)
    return store, closing(WeightServer(store, **options))


class SlowStore:
    """Makes no manifest until `go`; `asked` are the versions that manifests were made for."""

    def __init__(self, store: VersionStore) -> None:
        self._store, self.read = store, store.read
        self.go, self.asked = threading.Event(), list[int]()

    def manifest(self, have_lineage: str, have_version: int, want: int) -> Manifest:
        self.asked.append(have_version)
        self.go.wait(60)
        return self._store.manifest(have_lineage, have_version, want)


class Pull:
    """A pull in a thread; `result` waits for it and raises what it raised."""

    def __init__(self, puller: WeightPuller, have: Weights | None = None, deadline_s: float = 60.0) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(puller, have, deadline_s))
        self._thread.start()

    def _run(self, *asked: Any) -> None:
        puller, have, deadline_s = asked
        try:
            self._outcome.append(puller.pull(have, deadline_s))
        except WeightsError as problem:
            self._outcome.append(problem)

    def result(self) -> Weights:
        self._thread.join(90)
        assert not self._thread.is_alive(), "the pull does not end"
        assert self._outcome, "the pull ended with another error than it promises"
        (outcome,) = self._outcome
        if isinstance(outcome, WeightsError):
            raise outcome
        return outcome


# --- networks ---


def test_connections_cut_in_the_middle_of_a_tensor_cost_only_what_was_on_its_way(closing: Any) -> None:
    values = noise(24)
    _, server = publish(closing, {"w": values})
    link = closing(SlowLink(server.endpoint, rate=24 * MIB))
    credits = 2
    pull = Pull(closing(WeightPuller([link.endpoint], credits=credits, stall_s=0.5)))
    for part in (5, 10, 15):
        wait_until("next part", lambda part=part: link.carried > part * MIB)
        link.cut()
    assert np.array_equal(pull.result().tensors["w"].steps, values)
    lost_at_most = 3 * credits * 1.1 * MIB
    assert link.num_connections >= 4
    assert link.carried <= values.nbytes + lost_at_most, "pieces that had come were fetched again"


@pytest.mark.parametrize("rate", [1.0, 0.0001])
def test_a_peer_that_trickles_does_not_stretch_the_deadline(closing: Any, rate: float) -> None:
    _, server = publish(closing, {"w": noise(4)})
    link = closing(SlowLink(server.endpoint))
    puller = closing(WeightPuller([link.endpoint], stall_s=0.4))
    pull = Pull(puller, deadline_s=2.0)
    link.rate = rate
    started = time.monotonic()
    with pytest.raises(WeightsError, match="no verified version within 2 s"):
        pull.result()
    assert time.monotonic() - started < 3.0


def test_a_link_on_which_a_chunk_takes_longer_than_the_stall_time_is_not_given_up(closing: Any) -> None:
    values = noise(2)
    _, server = publish(closing, {"w": values})
    link = closing(SlowLink(server.endpoint, rate=1.2 * MIB))
    pulled = Pull(closing(WeightPuller([link.endpoint], credits=1, stall_s=0.3))).result()
    assert np.array_equal(pulled.tensors["w"].steps, values)
    assert link.carried < 3 * values.nbytes


def test_what_a_pull_that_failed_has_verified_is_not_fetched_again(closing: Any) -> None:
    tensors = {f"w{i}": noise(1, i) for i in range(8)}
    _, server = publish(closing, tensors)
    link = closing(SlowLink(server.endpoint, rate=4 * MIB))
    puller = closing(WeightPuller([link.endpoint], credits=1))
    with pytest.raises(WeightsError, match="had not sent"):
        puller.pull(deadline_s=1.2)
    before = puller.counts["full_tensors"]
    assert before >= 1
    assert puller.pull(deadline_s=60.0).tensors.keys() == tensors.keys()
    assert puller.counts["full_tensors"] == len(tensors)


# --- publishers that rush ---


@pytest.mark.parametrize("num_tensors", [1, 4])
def test_a_pull_ends_although_each_version_lasts_a_fraction_of_it(closing: Any, num_tensors: int) -> None:
    """The one tensor alone takes several versions to pull. Every version is remembered, so that what comes can be judged."""
    store, server = publish(closing, {f"w{i}": noise(4 / num_tensors, i) for i in range(num_tensors)})
    digests, stop = {0: store.newest.digest}, threading.Event()
    model = {f"w{i}": noise(4 / num_tensors, i) for i in range(num_tensors)}

    def rush() -> None:
        while not stop.wait(0.3):
            for values in model.values():
                values[::97] += np.uint16(1)
            made = store.publish(model)
            digests[made.version] = made.digest

    link = closing(SlowLink(server.endpoint, rate=4 * MIB))
    rushing = threading.Thread(target=rush)
    rushing.start()
    try:
        weights = Pull(closing(WeightPuller([link.endpoint], credits=2, chunk_bytes=1 << 18)), deadline_s=30.0).result()
    finally:
        stop.set()
        rushing.join()
    assert len(digests) > 3
    assert weights.digest == digests[weights.version]


# --- what is asked for ---


Answer = Callable[[Any, int], list[tuple[Any, list[Any], int]]]
"""To a request and its id: messages, or any bytes, with frames and an id each."""


class Peer:
    """A ROUTER that answers with what `answer` returns for each request: (message, frames, id) or several of them."""

    def __init__(self, answer: Answer) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.requests: list[Message] = []
        self._answer, self._stop = answer, threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            peer, frame = self._socket.recv_multipart()[:2]
            got = envelope.decode([frame], TYPES)
            self.requests.append(got.message)
            for message, frames, request_id in self._answer(got.message, got.header.id):
                header = message if isinstance(message, bytes) else envelope.encode(message, id=request_id)
                self._socket.send_multipart([peer, header, *frames])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._context.term()


def onward_of(store: VersionStore) -> Answer:
    """What a good server answers to chunk requests."""

    def answer(message: Any, request_id: int) -> list[tuple[Any, list[Any], int]]:
        payloads = [(store.read(message.lineage, message.version, p.name, p.base), p) for p in message.pieces]
        return [(ChunkReply(), [payload[p.offset : p.offset + p.length] for payload, p in payloads], request_id)]

    return answer


GARBAGE: dict[str, Answer] = {
    "noise": lambda message, id: [(np.random.default_rng(id).bytes(50), [b"x"], id)],
    "later": lambda message, id: [(ChunkReply(later=True), [], id)],
    "zeros": lambda message, id: [(ChunkReply(), [bytes(piece.length) for piece in message.pieces], id)],
    "short": lambda message, id: [(ChunkReply(), [bytes(max(0, piece.length - 1)) for piece in message.pieces], id)],
    "too many": lambda message, id: [(ChunkReply(), [*(bytes(piece.length) for piece in message.pieces), b"more"], id)],
    "all gone": lambda message, id: [(ChunkReply(gone=[*range(len(message.pieces)), 99, -1]), [b"" for _ in message.pieces], id)],
    "manifests": lambda message, id: [(ManifestReply(lineage="other", version=99), [b"\x80"], id)],
    "errors": lambda message, id: [(Error(code="internal", text="no", retryable=False), [], id)],
    "nobody's": lambda message, id: [(ChunkReply(), [bytes(100)], id + number) for number in (1000, 2000, -3000)],
    "silence": lambda message, id: [],
}
"""What may come in answer to a chunk request."""


def publisher_of(store: VersionStore, answer: Any) -> Peer:
    """Its manifest is right; what else it is asked for, `answer` answers."""
    bulk = msgspec.msgpack.encode(store.manifest("", -1))

    def reply(message: Any, request_id: int) -> list[tuple[Any, list[Any], int]]:
        if isinstance(message, ManifestRequest):
            return [(ManifestReply(lineage=store.lineage, version=0), [bulk], request_id)]
        return answer(message, request_id)

    return Peer(reply)


def naming(store: VersionStore, source: str) -> Any:
    """The store, with manifests that name a source for its payloads, unless it is avoided; see the server's own way of doing so."""
    return changed(store, lambda manifest: msgspec.structs.replace(manifest, sources=[source]))


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_a_worker_that_talks_nonsense_is_gone_around(closing: Any, monkeypatch: pytest.MonkeyPatch, answer: Any, puller_of: Any) -> None:
    monkeypatch.setattr(connection_module, "LATER_STALLS", 3)
    values = noise(0.1)
    store = VersionStore()
    store.publish({"w": values})
    source = closing(Peer(answer))
    puller = puller_of(naming(store, source.endpoint), stall_s=0.2)
    weights = puller.pull(deadline_s=15.0)
    assert np.array_equal(weights.tensors["w"].steps, values)
    assert puller.counts["bad_sources"] == 1
    assert len(source.requests) < 50, "it was asked without a pause"


@pytest.mark.parametrize("answer", GARBAGE.values(), ids=GARBAGE)
def test_a_publisher_that_talks_nonsense_leads_to_an_error_by_the_deadline(closing: Any, answer: Any) -> None:
    store = VersionStore()
    store.publish({"w": noise(0.1)})
    publisher = closing(publisher_of(store, answer))
    puller = closing(WeightPuller([publisher.endpoint], stall_s=0.2))
    started = time.monotonic()
    with pytest.raises(WeightsError):
        puller.pull(deadline_s=1.0)
    assert time.monotonic() - started < 2.0
    assert (puller._connections[0].refused["protocol"] > 0) == (answer is GARBAGE["noise"])


@pytest.mark.parametrize(
    "address",
    ["", "nonsense", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "inproc://x", "tcp://no such host:1", "tcp://127.0.0.1:1?key=k"],
)
def test_an_address_that_is_none_does_not_end_the_puller(address: str, puller_of: Any) -> None:
    values = noise(0.1)
    store = VersionStore()
    store.publish({"w": values})
    puller = puller_of(naming(store, address), stall_s=0.2)
    assert np.array_equal(puller.pull(deadline_s=15.0).tensors["w"].steps, values)


@pytest.mark.parametrize("address", ["nonsense", "tcp://", "tcp://127.0.0.1:x"])
def test_a_publisher_with_no_address_is_an_error(address: str) -> None:
    with pytest.raises(WeightsError, match="no address of a weight server"):
        WeightPuller([address])


@pytest.mark.parametrize("serves", ["x" * 600, "nonsense", "inproc://x"])
def test_a_worker_cannot_have_others_told_an_address_that_is_none(closing: Any, serves: str) -> None:
    _, server = publish(closing, {"w": noise(0.1)}, degree=1)
    with pytest.raises(WeightsError, match=r"at `body.serves`"):
        closing(WeightPuller([server.endpoint], relay=RelayPayloads(), serves=serves)).pull(deadline_s=5.0)


def test_a_busy_server_is_asked_again_for_what_it_has_put_off(closing: Any) -> None:
    store, put_off = VersionStore(), [5]
    values = noise(3)
    store.publish({"w": values})
    good = onward_of(store)

    def reply(message: Any, request_id: int) -> list[tuple[Any, list[Any], int]]:
        if put_off[0]:
            put_off[0] -= 1
            return [(Error(code="busy", text="later", retryable=True), [], request_id)]
        return good(message, request_id)

    puller = closing(WeightPuller([closing(publisher_of(store, reply)).endpoint]))
    assert np.array_equal(puller.pull(deadline_s=10.0).tensors["w"].steps, values)
    assert (puller.counts["rounds"], puller.counts["received_bytes"]) == (0, values.nbytes)


@pytest.mark.parametrize("credits", [1, 4])
def test_no_more_is_asked_for_at_once_than_the_credits_allow(closing: Any, credits: int) -> None:
    """A server that answers only what has waited for a while sees how much was asked for meanwhile."""
    store, waiting, most = VersionStore(), [], [0]
    store.publish({f"w{i}": noise(0.5, i) for i in range(12)})
    good = onward_of(store)

    def reply(message: Any, request_id: int) -> list[tuple[Any, list[Any], int]]:
        waiting.append((message, request_id))
        most[0] = max(most[0], sum(piece.length for asked, _ in waiting for piece in asked.pieces))
        if len(waiting) < credits and len(publisher.requests) < 12:
            return []
        answers = [answer for asked in waiting for answer in good(*asked)]
        waiting.clear()
        return answers

    publisher = closing(publisher_of(store, reply))
    puller = closing(WeightPuller([publisher.endpoint], credits=credits, chunk_bytes=1 << 19, stall_s=1.0))
    assert len(puller.pull(deadline_s=20.0).tensors) == 12
    assert most[0] <= credits << 19


def test_a_version_number_with_other_bytes_is_pulled_and_not_taken_for_the_old_one(puller_of: Any) -> None:
    first, second = (VersionStore(lineage="same") for _ in range(2))
    first.publish({"w": noise(0.1, 1)})
    second.publish({"w": noise(0.1, 2)})
    have = puller_of(first).pull(deadline_s=10.0)
    got = puller_of(second).pull(have, deadline_s=10.0)
    assert np.array_equal(got.tensors["w"].steps, noise(0.1, 2))


def test_of_the_manifests_that_one_peer_asks_for_while_one_is_made_the_last_is_made(closing: Any) -> None:
    store = VersionStore(keep=4)
    store.publish({"w": noise(0.1)})
    slow: Any = SlowStore(store)
    server = closing(WeightServer(slow))
    flood = closing(WeightServerConnection(server.endpoint, name="flood", stall_s=60))
    flood.send(ManifestRequest(have_version=0))
    wait_until("a manifest in the making", lambda: slow.asked)
    last = [flood.send(ManifestRequest(have_version=version)) for version in range(1, 301)][-1]
    behind = flood.send(ChunkRequest(lineage="", version=0, pieces=[]))
    answers: list[int] = []
    wait_until("all to be read", lambda: answers.extend(a[0] for a in flood.receive(0.1)) or behind in answers)
    slow.go.set()
    wait_until("the last", lambda: answers.extend(a[0] for a in flood.receive(0.1)) or last in answers)
    assert slow.asked == [0, 300]
    assert len(answers) == 3

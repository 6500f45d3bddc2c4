"""Pulls over real sockets end with a verified version or with an error, whatever happens on the way."""

import itertools
import threading
import time

import numpy as np
import pytest
import zmq
from changed_store import changed

from slimebus.bus import envelope
from slimebus.bus.errors import WeightsError
from slimebus.bus.messages import Ok
from slimebus.weights.codec import delta_codec
from slimebus.weights.messages import TYPES, ChunkReply, ChunkRequest, ManifestRequest, Piece
from slimebus.weights.pull import verify
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE


@pytest.fixture
def store(model):
    store = VersionStore(keep=4)
    store.publish(model)
    return store


@pytest.mark.parametrize("threads", [1, 4])
def test_the_units_of_a_large_tensor_are_verified_by_any_number_of_threads(after, model, check, monkeypatch, threads, puller_of):
    monkeypatch.setattr(delta_codec, "UNIT_VALUES", 1000)
    monkeypatch.setattr(verify, "MIN_POOLED_BYTES", 1)
    store = VersionStore()
    store.publish(model)
    puller = puller_of(store, threads=threads)
    first = puller.pull()
    newer = after(model, 1)
    store.publish(newer)
    check(puller.pull(first), newer)
    assert puller.counts["wrong_bytes"] == 0
    assert puller.counts["delta_tensors"] > 0


def test_the_stages_are_of_the_last_pull_and_lie_within_its_time(store, model, after, puller_of):
    puller = puller_of(store)
    first = puller.pull()
    store.publish(after(model, 1))
    started = time.perf_counter()
    puller.pull(first)
    took_s, stages = time.perf_counter() - started, puller.stages.seconds
    assert set(stages) == {"wire", "verify"}
    assert 0 < sum(stages.values()) < took_s


def test_first_all_then_only_what_changed(store, model, after, check, puller_of):
    puller = puller_of(store)
    first = puller.pull()
    check(first, model)
    assert (first.lineage, first.version, first.digest) == (store.lineage, 0, store.newest.digest)
    assert puller.pull(first) is first
    newer = after(model, 1)
    made = store.publish(newer)
    received = puller.counts["received_bytes"]
    second = puller.pull(first)
    check(second, newer)
    check(first, model)
    assert second.digest == made.digest
    assert puller.counts["received_bytes"] - received == made.delta_bytes
    assert second.tensors["fixed"].buffer is first.tensors["fixed"].buffer


def test_a_worker_far_behind_gets_one_merged_delta_and_further_behind_a_full_copy(store, model, after, check, puller_of):
    puller = puller_of(store)
    weights = puller.pull()
    for behind in (4, 6):
        for seed in range(behind):
            model = after(model, 100 * behind + seed)
            store.publish(model)
        puller.counts["delta_tensors"] = puller.counts["full_tensors"] = 0
        weights = puller.pull(weights)
        check(weights, model)
        assert (puller.counts["delta_tensors"] > 0) == (behind <= store.keep)


def test_a_server_that_dies_in_the_middle_of_a_tensor_is_resumed(model, check, closing):
    big = {**model, "big": np.random.default_rng(0).integers(0, 65536, 3_000_000).astype(np.uint16)}
    store = VersionStore()
    store.publish(big)
    died, reads = threading.Event(), itertools.count()

    def die(name, base, payload):
        if next(reads) == 4:
            server._closing.set()  # the loop ends without an answer, as when the process is killed
            died.set()
        return payload

    server = closing(WeightServer(changed(store, read=die)))
    puller = closing(WeightPuller([server.endpoint], credits=2, stall_s=0.3))
    pulled = []
    thread = threading.Thread(target=lambda: pulled.append(puller.pull(deadline_s=20)))
    thread.start()
    assert died.wait(10)
    server._thread.join(10)
    closing(WeightServer(store, server.endpoint))
    thread.join(20)
    check(pulled[0], big)
    assert puller.counts["received_bytes"] < pulled[0].size_bytes + 4 * (1 << 20)


def test_a_full_pull_ends_although_versions_rush_by(model, after, check, puller_of):
    """What is verified is kept and stepped on, so each round has less to fetch."""
    store = VersionStore(keep=50)
    wide = {**model, **{f"layer{i}": np.full(20_000, i, np.uint16) for i in range(12)}}
    versions, reads = [wide], itertools.count(1)
    store.publish(wide)

    def publish_often(name, base, payload):
        if base == NO_BASE and next(reads) % 3 == 0 and len(versions) < 40:
            newer = {n: (v + 1).astype(np.uint16) if n.startswith("layer") else v for n, v in versions[-1].items()}
            versions.append(newer)
            store.publish(newer)
        return payload

    puller = puller_of(changed(store, read=publish_often), chunk_bytes=40_000, credits=1)
    weights = puller.pull(deadline_s=30)
    check(weights, versions[weights.version])
    assert puller.counts["rounds"] >= 3
    assert len(versions) < 40
    assert puller.counts["delta_tensors"] > 0


def test_wrong_bytes_are_pulled_whole_and_then_refused(store, model, after, check, puller_of):
    newer = after(model, 1)
    wrong = {"times": 1}

    def damage(name, base, payload):
        if name == "embed" and wrong["times"] > 0:
            wrong["times"] -= 1
            return memoryview(bytes(len(payload)))
        return payload

    puller = puller_of(changed(store, read=damage))
    with_one = puller.pull()
    check(with_one, model)
    assert puller.counts["wrong_bytes"] == 1
    store.publish(newer)
    wrong["times"] = 1
    with_two = puller.pull(with_one)
    check(with_two, newer)
    assert (puller.counts["wrong_bytes"], puller.counts["delta_tensors"]) == (2, 3)
    store.publish(after(newer, 2))
    wrong["times"] = 100
    with pytest.raises(WeightsError, match=r"'embed' .* failed its checksum 3 times"):
        puller.pull(with_two)
    check(with_two, newer)


def test_a_base_that_rotted_in_memory_is_noticed_after_the_apply(store, model, after, check, puller_of):
    puller = puller_of(store)
    have = puller.pull()
    have.tensors["embed"].buffer[100] ^= 1
    newer = after(model, 1)
    store.publish(newer)
    check(puller.pull(have), newer)
    assert puller.counts["wrong_bytes"] == 1


def test_a_new_lineage_replaces_the_old_one_and_reuses_equal_tensors(store, model, after, check, closing):
    server = closing(WeightServer(store))
    puller = closing(WeightPuller([server.endpoint]))
    old = puller.pull()
    server.close()
    restarted = VersionStore(lineage="restored", first_version=0)
    newer = after(model, 5)
    restarted.publish(newer)
    closing(WeightServer(restarted, server.endpoint))
    new = puller.pull(old, deadline_s=20)
    check(new, newer)
    assert new.lineage == "restored"
    assert new.tensors["fixed"].buffer is old.tensors["fixed"].buffer


def test_the_deadline_names_the_server_that_does_not_answer(closing, caplog):
    caplog.set_level("INFO", "slimebus.weights")
    puller = closing(WeightPuller(["tcp://127.0.0.1:9"], stall_s=0.02))
    with pytest.raises(WeightsError, match=r"within 0 s from tcp://127.0.0.1:9.*trainer running"):
        puller.pull(deadline_s=0.49)
    assert "no word from the weight server at tcp://127.0.0.1:9" in caplog.text, "nor are two minutes spent in silence"


def test_nothing_published_yet_is_waited_for(model, check, puller_of):
    store = VersionStore()
    puller = puller_of(store)
    with pytest.raises(WeightsError, match="no version has been published"):
        puller.pull(deadline_s=0.2)
    threading.Timer(0.1, store.publish, (model,)).start()
    check(puller.pull(deadline_s=10), model)


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_a_pull_that_another_thread_ends_is_over_soon(closing, end):
    puller = closing(WeightPuller(["tcp://127.0.0.1:9"]))
    threading.Timer(0.1, getattr(puller, end)).start()
    started = time.monotonic()
    with pytest.raises(WeightsError, match="cancelled"):
        puller.pull(deadline_s=60)
    assert time.monotonic() - started < 5
    with pytest.raises(WeightsError, match="cancelled"):
        puller.pull(deadline_s=60)


def test_the_server_survives_garbage_and_refuses_what_it_cannot_serve(store, model, check, closing):
    server = closing(WeightServer(store))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(server.endpoint)
    rng = np.random.default_rng(0)
    for size in (0, 1, 7, 500, 100_000):
        socket.send_multipart([rng.bytes(size), rng.bytes(10)])
    many = [Piece("embed", NO_BASE, 0, 1)] * 257
    refused = [
        ChunkRequest(lineage=store.lineage, version=0, pieces=many),
        ChunkRequest(lineage=store.lineage, version=0, pieces=[Piece("embed", NO_BASE, 0, 1 << 40)]),
        ChunkRequest(lineage=store.lineage, version=0, pieces=[Piece("embed", NO_BASE, 89_000, 1000)]),
        ChunkRequest(lineage=store.lineage, version=0, pieces=[Piece("embed", NO_BASE, -5, 10)]),
        ChunkRequest(lineage="other", version=0, pieces=[Piece("embed", NO_BASE, 0, 1)]),
        Ok(),
        ManifestRequest(serves="http://10.0.0.1:80"),
        ManifestRequest(serves="tcp://" + "x" * 512),
    ]
    for number, message in enumerate(refused):
        socket.send(envelope.encode(message, id=number + 1, sender="me"))
    codes: dict[int, str] = {}
    while len(codes) < len(refused):
        assert socket.poll(5000)
        got = envelope.decode(socket.recv_multipart(), TYPES)
        if got.header.id:
            codes[got.header.id] = f"gone {got.message.gone}" if isinstance(got.message, ChunkReply) else got.message.code
    assert [codes[i + 1] for i in range(len(refused))] == [
        *("protocol", "bad_chunk", "bad_chunk", "protocol", "gone [0]", "unexpected", "protocol", "protocol")
    ]
    socket.close()
    context.term()
    assert sum(server.refused.values()) >= 10
    puller = closing(WeightPuller([server.endpoint]))
    check(puller.pull(), model)

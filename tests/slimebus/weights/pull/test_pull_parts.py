"""A version in parts, which counts when all publishers agree and verify; workers that pass it on, of whom nobody is trusted."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from changed_store import changed

from slimebus.bus.errors import WeightsError
from slimebus.security.allow_list import grant
from slimebus.security.key_file import KeyPair, make_pair
from slimebus.weights.messages import Manifest, ManifestRequest
from slimebus.weights.pull.connection import WeightServerConnection, with_key
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE, Target

Model = dict[str, Any]


class Parts:
    """A model over `count` publishers."""

    def __init__(self, closing: Any, model: Model, count: int, change: Any = lambda manifest: manifest, degree: int = 0) -> None:
        self.names, self.closing = [list(model)[i::count] for i in range(count)], closing
        self.stores = [VersionStore(lineage="l") for _ in range(count)]
        self.servers = [closing(WeightServer(changed(store, change), degree=degree)) for store in self.stores]
        self.publish(model)

    def publish(self, model: Model) -> None:
        for store, names in zip(self.stores, self.names, strict=True):
            store.publish({name: model[name] for name in names})

    def puller(self, **options: Any) -> WeightPuller:
        return self.closing(WeightPuller([server.endpoint for server in self.servers], **options))

    def worker(self, **options: Any) -> tuple[WeightPuller, WeightServer]:
        """One that passes on what it pulls."""
        payloads = RelayPayloads()
        server = self.closing(WeightServer(payloads))
        return self.puller(relay=payloads, serves=server.endpoint, **options), server

    def name(self, passing: WeightServer) -> None:
        """Publishers know this worker as one that pulls the newest version."""
        for server in self.servers:
            link = WeightServerConnection(server.endpoint, name="w", stall_s=3.0)
            link.ask(ManifestRequest(serves=passing.endpoint), time.monotonic() + 10, threading.Event())
            link.close()


@pytest.fixture
def make(closing: Any) -> Callable[..., Parts]:
    return partial(Parts, closing)


def test_a_worker_passes_on_the_parts_of_all_publishers(make, model, after, check) -> None:
    """Both publishers name the same worker; what comes from it is not mixed up, and the publishers send each byte once."""
    parts = make(model, 2, degree=1)
    (first, passing), (second, _) = parts.worker(), parts.worker()
    weights = first.pull(deadline_s=20)
    sent = [server.sent_bytes for server in parts.servers]
    others = second.pull(deadline_s=20)
    for seed in (1, 2):
        check(others, model)
        assert others.digest == weights.digest == VersionStore().publish(model).digest
        assert [server.sent_bytes for server in parts.servers] == sent, "the second worker had everything from the first"
        model = after(model, seed)
        parts.publish(model)
        weights = first.pull(weights, deadline_s=20)
        sent = [server.sent_bytes for server in parts.servers]
        others = second.pull(others, deadline_s=20)
    assert passing.sent_bytes == second.counts["received_bytes"]
    assert second.counts["bad_sources"] == 0


def test_a_worker_that_was_not_asked_for_long_is_not_taken_for_a_silent_one(make, model, after, check) -> None:
    parts = make(model, 2, degree=1)
    (first, passing), (second, _) = parts.worker(), parts.worker()
    weights, others = first.pull(deadline_s=20), second.pull(deadline_s=20)
    model = after(model, 1)
    parts.publish(model)
    first.pull(weights, deadline_s=20)
    for link in second._sources.values():
        link._heard_at -= 100
    read = passing._store.read
    passing._store.read = lambda *asked: (time.sleep(0.3), read(*asked))[1]
    check(second.pull(others, deadline_s=20), model)
    assert second.counts["bad_sources"] == 0


def test_a_worker_that_is_named_before_it_has_begun_is_waited_for(make, model, check) -> None:
    """As while its other publishers are still on their way to the version."""
    parts = make(model, 2, degree=1)
    (first, passing), (second, _) = parts.worker(), parts.worker()
    parts.name(passing)
    late = threading.Timer(0.3, first.pull)
    late.start()
    check(second.pull(deadline_s=20), model)
    late.join()
    assert second.counts["bad_sources"] == 0
    assert passing.sent_bytes == second.counts["received_bytes"]


def test_a_worker_that_never_begins_is_gone_around(make, model, check) -> None:
    parts = make(model, 2, degree=1)
    (_, passing), (second, _) = parts.worker(), parts.worker()
    parts.name(passing)
    started = time.monotonic()
    check(second.pull(deadline_s=20), model)
    assert time.monotonic() - started < 10
    assert second.counts["bad_sources"] == 1


def test_a_worker_that_has_gone_on_is_asked_again_for_the_next_version(make, model, after, check) -> None:
    parts = make(model, 1, degree=1)
    (first, passing), (second, _) = parts.worker(), parts.worker()
    weights, others = first.pull(deadline_s=20), second.pull(deadline_s=20)
    parts.publish(after(model, 1))
    first.pull(weights, deadline_s=20)
    passing._store.begin(Target("l", 7), [])  # before the second has asked
    check(second.pull(others, deadline_s=20), after(model, 1))
    assert second.counts["bad_sources"] == 1
    parts.publish(newest := after(model, 2))
    first.pull(weights, deadline_s=20)
    before = passing.sent_bytes
    check(second.pull(others, deadline_s=20), newest)
    assert passing.sent_bytes > before
    assert second.counts["bad_sources"] == 1


def test_a_version_counts_when_all_publishers_have_it_and_what_some_had_before_is_kept(make, model, after, check) -> None:
    parts = make(model, 3)
    puller, fresh = parts.puller(), parts.puller()
    weights, newer = puller.pull(), after(model, 1)
    for store, names in zip(parts.stores[:2], parts.names, strict=False):
        store.publish({name: newer[name] for name in names})
    assert puller.pull(weights, deadline_s=10) is weights, "the newest that all have"
    places = [server.endpoint for server in parts.servers]
    with pytest.raises(WeightsError, match=f"different versions: {places[0]} at 1 of l, .*, {places[2]} at 0 of l"):
        fresh.pull(deadline_s=0.3)
    parts.stores[2].publish({name: newer[name] for name in parts.names[2]})
    check(puller.pull(weights, deadline_s=10), newer)
    before = fresh.counts["received_bytes"]
    check(fresh.pull(deadline_s=10), newer)
    assert fresh.counts["received_bytes"] - before < parts.stores[2].newest.total_bytes


def test_publishers_are_asked_at_once(make, model, check) -> None:
    """Each may have to merge a chain before it answers; here none answers before all are asked."""
    together = threading.Barrier(3, timeout=10)

    def wait_for_the_others(manifest: Manifest) -> Manifest:
        together.wait()
        return manifest

    check(make(model, 3, wait_for_the_others).puller().pull(deadline_s=20), model)


@pytest.mark.parametrize("ahead_by", [1, 3])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_a_publisher_that_is_always_ahead_of_another_keeps_no_worker_waiting(
    make, model, after, check, ahead_by: int, is_fresh: bool
) -> None:
    """Each takes its time to diff and encode: where that is longer than a step, the two are never at one version."""
    parts = make(model, 2)
    models = [model]

    def publish(which: int) -> None:
        version = parts.stores[which].next_version
        if version == len(models):
            models.append(after(models[-1], version) | {"scale": model["scale"]})  # float32 has no deltas: what has changed is gone
        parts.stores[which].publish({name: models[version][name] for name in parts.names[which]})

    puller = parts.puller()
    have = None if is_fresh else puller.pull(deadline_s=20)
    for _ in range(ahead_by):
        publish(0)
    manifest = parts.servers[0]._store.manifest

    def advancing(*asked: Any) -> Manifest:
        """Between two looks of the puller, which asks publisher 0 at least once in each, both go on."""
        for which in (0, 1) if asked[2] == NO_BASE else ():
            publish(which)
        return manifest(*asked)

    parts.servers[0]._store.manifest = advancing
    for _ in range(3):
        have = puller.pull(have, deadline_s=20)
        assert have.version < parts.stores[0].newest.version
        check(have, models[have.version])
        assert have.digest == VersionStore(first_version=have.version).publish(models[have.version]).digest


def test_a_part_whose_digest_is_another_is_refused(make, model) -> None:
    def lie(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, digest="0" * 32) if any(e.name == "embed" for e in manifest.tensors) else manifest

    with pytest.raises(WeightsError, match="its manifest is wrong: digest"):
        make(model, 2, lie).puller().pull(deadline_s=0.5)


def test_a_tensor_that_two_publishers_serve_is_refused_before_it_is_pulled(make, model) -> None:
    parts = make(model, 2)
    parts.stores[1].publish(model)
    parts.stores[0].publish({"embed": model["embed"]})
    puller = parts.puller()
    with pytest.raises(WeightsError, match="tensor 'embed' is served by two publishers"):
        puller.pull(deadline_s=5)
    assert puller.counts["received_bytes"] == 0


def test_the_bound_on_size_is_one_for_all_parts(make, model) -> None:
    parts = make(model, 3)
    size = sum(store.newest.total_bytes for store in parts.stores)
    assert parts.puller(max_bytes=size).pull(deadline_s=20).size_bytes == size
    with pytest.raises(WeightsError, match="larger than"):
        parts.puller(max_bytes=size - 1).pull(deadline_s=20)


def test_parts_of_two_lineages_make_no_version(make, closing, model) -> None:
    """A trainer restarted, and one of its old ranks is still there: same version number, other weights."""
    parts = make(model, 2)
    stranger = VersionStore(lineage="older")
    stranger.publish({name: model[name] for name in parts.names[1]})
    old = closing(WeightServer(stranger))
    puller = closing(WeightPuller([parts.servers[0].endpoint, old.endpoint]))
    with pytest.raises(WeightsError, match=rf"different versions: {parts.servers[0].endpoint} at 0 of l, {old.endpoint} at 0 of older"):
        puller.pull(deadline_s=0.3)


def test_the_publisher_sends_each_version_as_often_as_its_degree(make, model, after, check) -> None:
    parts = make(model, 1, degree=2)
    pullers, pulled = [parts.worker()[0] for _ in range(9)], [None] * 9
    with ThreadPoolExecutor(9) as pool:
        for seed in range(3):
            before = parts.servers[0].sent_bytes
            pulled = list(pool.map(lambda puller, have: puller.pull(have, 20.0), pullers, pulled))
            for weights in pulled:
                check(weights, model)
            newest = parts.stores[0].newest
            assert parts.servers[0].sent_bytes - before == 2 * (newest.delta_bytes if seed else newest.total_bytes)
            model = after(model, seed)
            parts.publish(model)
    assert sum(puller.counts["from_workers"] for puller in pullers) >= 3 * 7


def test_a_worker_that_dies_is_gone_around(make, model, after, check) -> None:
    parts = make(model, 1, degree=1)
    (first, passing), (second, _), (third, _) = (parts.worker(stall_s=0.3) for _ in range(3))
    have = [puller.pull(deadline_s=10) for puller in (first, second, third)]
    parts.publish(after(model, 1))
    first.pull(have[0], deadline_s=10)
    passing.close()
    check(second.pull(have[1], deadline_s=10), after(model, 1))
    assert second.counts["bad_sources"] == 1
    check(third.pull(have[2], deadline_s=10), after(model, 1))


def test_a_payload_that_is_on_its_way_is_waited_for(make, model, check) -> None:
    parts = make(model, 1, degree=1)
    (_, passing), (second, _) = parts.worker(), parts.worker()
    version, read = parts.stores[0].newest, parts.stores[0].read
    names = [(form.name, NO_BASE) for form in version.forms]
    parts.name(passing)
    passing._store.begin(Target(version.lineage, version.version), names)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.pull, deadline_s=20)
        with pytest.raises(TimeoutError):
            waiting.result(1.5)
        for name, base in names:
            passing._store.add(name, base, read(version.lineage, version.version, name, base))
        check(waiting.result(10), model)
    assert second.counts["bad_sources"] == 0


@pytest.mark.parametrize("degree", [0, 2])
def test_a_worker_that_passes_nothing_on_pulls_all_the_same(make, model, check, degree: int) -> None:
    parts = make(model, 1, degree=degree)
    for puller in (parts.worker()[0], parts.worker()[0], parts.puller()):
        check(puller.pull(deadline_s=10), model)


def keyring(pair: KeyPair, grants: dict[str, Any]) -> Any:
    return SimpleNamespace(pair=pair, grants=grants, generation=1, problem="", refresh=lambda: None)


def test_with_keys_workers_pull_from_each_other_and_a_stranger_from_nobody(closing, model, check) -> None:
    pairs = {name: make_pair() for name in ("trainer", "w1", "w2", "stranger")}
    grants = {pairs[name].public: grant(name, "rollout") for name in ("w1", "w2")}
    store = VersionStore()
    store.publish(model)
    publisher = closing(WeightServer(store, degree=1, keyring=keyring(pairs["trainer"], grants)))
    address = with_key(publisher.endpoint, pairs["trainer"].public)
    servers, pullers = [], []
    for name in ("w1", "w2"):
        payloads = RelayPayloads()
        servers.append(closing(WeightServer(payloads, keyring=keyring(pairs[name], grants))))
        serves = with_key(servers[-1].endpoint, pairs[name].public)
        pullers.append(closing(WeightPuller([address], relay=payloads, serves=serves, pair=pairs[name])))
        check(pullers[-1].pull(deadline_s=10.0), model)
    assert pullers[1].counts["from_workers"] == 1
    assert servers[0].sent_bytes == store.newest.total_bytes
    with pytest.raises(WeightsError):
        closing(WeightPuller([with_key(servers[0].endpoint, pairs["w1"].public)], pair=pairs["stranger"], stall_s=0.2)).pull(deadline_s=1.0)

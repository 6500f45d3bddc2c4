"""A version in parts: every publisher is asked at once, and it counts when all of them agree and verify."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from slimebus.bus.errors import WeightsError
from slimebus.weights.messages import Manifest, ManifestRequest
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE, Target

Model = dict[str, Any]


class Changed:
    """A store whose manifests go through `change`."""

    def __init__(self, store: VersionStore, change: Callable[[Manifest], Manifest]) -> None:
        self.store, self.change = store, change

    def manifest(self, lineage: str, version: int, want: int = -1) -> Manifest:
        return self.change(self.store.manifest(lineage, version, want))

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        return self.store.read(lineage, version, name, base)


class Parts:
    """A model over `count` publishers, and whatever a test opens, closed with it."""

    def __init__(self, model: Model, count: int, change: Callable[[Manifest], Manifest] = lambda m: m, degree: int = 0) -> None:
        self.names = [list(model)[i::count] for i in range(count)]
        self.stores = [VersionStore(lineage="l") for _ in range(count)]
        self.servers = [WeightServer(Changed(store, change), degree=degree) for store in self.stores]
        self.opened: list[Any] = list(self.servers)
        self.publish(model)

    def publish(self, model: Model) -> None:
        for store, names in zip(self.stores, self.names, strict=True):
            store.publish({name: model[name] for name in names})

    def puller(self, **options: Any) -> WeightPuller:
        puller = WeightPuller([server.endpoint for server in self.servers], **options)
        self.opened.append(puller)
        return puller

    def worker(self) -> tuple[WeightPuller, WeightServer]:
        """One that passes on what it pulls."""
        payloads = RelayPayloads()
        server = WeightServer(payloads)
        self.opened.append(server)
        return self.puller(relay=payloads, serves=server.endpoint), server


@pytest.fixture
def make() -> Iterator[Callable[..., Parts]]:
    made: list[Parts] = []

    def start(*given: Any, **options: Any) -> Parts:
        made.append(Parts(*given, **options))
        return made[-1]

    yield start
    for parts in made:
        for closable in reversed(parts.opened):
            closable.close()


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
    named = ManifestRequest(serves=passing.endpoint)
    for link in first._connections:
        link.ask(named, time.monotonic() + 10, threading.Event())
    late = threading.Timer(0.3, first.pull)
    late.start()
    check(second.pull(deadline_s=20), model)
    late.join()
    assert second.counts["bad_sources"] == 0
    assert passing.sent_bytes == second.counts["received_bytes"]


def test_a_worker_that_never_begins_is_gone_around(make, model, check) -> None:
    parts = make(model, 2, degree=1)
    (first, passing), (second, _) = parts.worker(), parts.worker()
    for link in first._connections:
        link.ask(ManifestRequest(serves=passing.endpoint), time.monotonic() + 10, threading.Event())
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


def test_parts_of_two_lineages_make_no_version(make, model) -> None:
    """A trainer restarted, and one of its old ranks is still there: same version number, other weights."""
    parts = make(model, 2)
    stranger = VersionStore(lineage="older")
    stranger.publish({name: model[name] for name in parts.names[1]})
    old = WeightServer(stranger)
    parts.opened.append(old)
    puller = WeightPuller([parts.servers[0].endpoint, old.endpoint])
    parts.opened.append(puller)
    with pytest.raises(WeightsError, match=rf"different versions: {parts.servers[0].endpoint} at 0 of l, {old.endpoint} at 0 of older"):
        puller.pull(deadline_s=0.3)

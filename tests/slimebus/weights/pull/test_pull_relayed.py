"""Workers that pull from each other: the publisher's link carries few copies, and no peer is trusted."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from slimebus.bus.errors import WeightsError
from slimebus.security.allow_list import grant
from slimebus.security.key_file import KeyPair, make_pair
from slimebus.weights.messages import ManifestRequest
from slimebus.weights.pull.connection import WeightServerConnection, with_key
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import Target, Weights


class Worker:
    """A puller with a server beside it that passes on what it pulls."""

    def __init__(self, publisher: str, payloads: RelayPayloads | None = None, stall_s: float = 0.3) -> None:
        self.payloads = payloads or RelayPayloads()
        self.server = WeightServer(self.payloads)
        self.puller = WeightPuller([publisher], relay=self.payloads, serves=self.server.endpoint, stall_s=stall_s)
        self.weights: Weights | None = None

    def pull(self) -> Weights:
        self.weights = self.puller.pull(self.weights, 10.0)
        return self.weights

    def close(self) -> None:
        self.puller.close()
        self.server.close()


class Crowd:
    """A publisher of degree 1 or 2 and workers that pull at once."""

    def __init__(self, model: Any, degree: int, count: int, stall_s: float = 0.3) -> None:
        self.store = VersionStore(keep=4)
        self.store.publish(model)
        self.publisher = WeightServer(self.store, degree=degree)
        self.workers = [Worker(self.publisher.endpoint, stall_s=stall_s) for _ in range(count)]

    def pull(self) -> None:
        threads = [threading.Thread(target=worker.pull) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *problem: object) -> None:
        for worker in self.workers:
            worker.close()
        self.publisher.close()


def test_the_publisher_sends_each_version_as_often_as_its_degree(model: Any, after: Any, check: Any) -> None:
    with Crowd(model, degree=2, count=9, stall_s=3.0) as crowd:
        for seed in range(3):
            before = crowd.publisher.sent_bytes
            crowd.pull()
            for worker in crowd.workers:
                check(worker.weights, model)
            size = crowd.store.newest.delta_bytes if seed else crowd.store.newest.total_bytes
            assert crowd.publisher.sent_bytes - before == 2 * size
            model = after(model, seed)
            crowd.store.publish(model)
        assert sum(worker.puller.counts["from_workers"] for worker in crowd.workers) >= 3 * 7


def test_a_worker_that_dies_is_gone_around(model: Any, after: Any, check: Any) -> None:
    with Crowd(model, degree=1, count=3) as crowd:
        for worker in crowd.workers:
            worker.pull()
        newer = after(model, 1)
        crowd.store.publish(newer)
        first, second, third = crowd.workers
        first.pull()
        first.server.close()
        check(second.pull(), newer)
        assert second.puller.counts["bad_sources"] == 1
        check(third.pull(), newer)


def test_a_payload_that_is_on_its_way_is_waited_for(model: Any, check: Any) -> None:
    with Crowd(model, degree=1, count=2, stall_s=3.0) as crowd:
        first, second = crowd.workers
        version = crowd.store.newest
        names = [(form.name, -1) for form in version.forms]
        link = WeightServerConnection(crowd.publisher.endpoint, name="first", stall_s=3.0)
        link.ask(ManifestRequest(serves=first.server.endpoint), time.monotonic() + 5, threading.Event())
        link.close()
        first.payloads.begin(Target(version.lineage, version.version), names)
        waiting = threading.Thread(target=second.pull)
        waiting.start()
        waiting.join(1.5)
        assert waiting.is_alive(), "it did not wait for the worker above it"
        for name, base in names:
            first.payloads.add(name, base, crowd.store.read(version.lineage, version.version, name, base))
        waiting.join(10)
        check(second.weights, model)
        assert second.puller.counts["bad_sources"] == 0


@pytest.mark.parametrize("degree", [0, 2])
def test_a_worker_that_passes_nothing_on_pulls_all_the_same(model: Any, check: Any, degree: int) -> None:
    with Crowd(model, degree=degree, count=2) as crowd:
        crowd.pull()
        plain = WeightPuller([crowd.publisher.endpoint])
        check(plain.pull(deadline_s=10.0), model)
        plain.close()


def keyring(pair: KeyPair, grants: dict[str, Any]) -> Any:
    return SimpleNamespace(pair=pair, grants=grants, generation=1, problem="", refresh=lambda: None)


def test_with_keys_workers_pull_from_each_other_and_a_stranger_from_nobody(model: Any, check: Any) -> None:
    pairs = {name: make_pair() for name in ("trainer", "w1", "w2", "stranger")}
    grants = {pairs[name].public: grant(name, "rollout") for name in ("w1", "w2")}
    store = VersionStore()
    store.publish(model)
    publisher = WeightServer(store, degree=1, keyring=keyring(pairs["trainer"], grants))
    address = with_key(publisher.endpoint, pairs["trainer"].public)
    servers, pullers = [publisher], []
    for name in ("w1", "w2"):
        payloads = RelayPayloads()
        servers.append(WeightServer(payloads, keyring=keyring(pairs[name], grants)))
        serves = with_key(servers[-1].endpoint, pairs[name].public)
        pullers.append(WeightPuller([address], relay=payloads, serves=serves, pair=pairs[name]))
        check(pullers[-1].pull(deadline_s=10.0), model)
    assert pullers[1].counts["from_workers"] == 1
    assert servers[1].sent_bytes == store.newest.total_bytes
    pullers.append(WeightPuller([with_key(servers[1].endpoint, pairs["w1"].public)], pair=pairs["stranger"], stall_s=0.2))
    with pytest.raises(WeightsError):
        pullers[-1].pull(deadline_s=1.0)
    for closable in (*pullers, *servers):
        closable.close()

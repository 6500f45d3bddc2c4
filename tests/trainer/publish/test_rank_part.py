"""Two publishers, as on two pipeline stages, and the version that a puller makes of their parts."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bf16 import to_bf16
from torch.distributed import HashStore

from slimebus.bus.errors import ConfigError, WeightsError
from slimebus.bus.messages import Publish
from slimebus.config.schema import BrokerConfig, RunConfig
from slimebus.weights.files.disk_chain import DiskChain, DiskPuller
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE
from trainer.publish.part_exchange import PartExchange, RankPartReport
from trainer.publish.publication import Coordinator, check_reach
from trainer.publish.rank_part import HostSnapshot, RankPart, bind_of

Tensors = dict[str, torch.Tensor]


class Broker:
    """Stands in for the client: remembers what the broker is told."""

    def __init__(self) -> None:
        self.told: list[Publish] = []

    def call(self, message: Publish, *, timeout_s: float) -> None:
        self.told.append(message)

    def submit(self, message: Publish) -> None:
        self.told.append(message)


class Stages:
    """Two publishing ranks of one trainer, 0 and 3."""

    def __init__(self) -> None:
        shared = HashStore()
        self.broker, self.exchanges = Broker(), [PartExchange(shared, "l") for _ in range(2)]
        self.coordinator = Coordinator(self.broker, "l", self.exchanges[0], [3])  # type: ignore[arg-type]
        reports: list[Callable[[int, RankPartReport], None]] = [
            self.coordinator.announce,
            lambda v, part: self.exchanges[1].post(v, 3, part),
        ]
        stores = [VersionStore(lineage="l", first_version=5) for _ in range(2)]
        self.publishers = [RankPart(RunConfig(), stores[i], None, reports[i], place=i) for i in range(2)]

    def publish(self, version: int, model: Tensors) -> None:
        for publisher, part in zip(self.publishers, split(model), strict=True):
            publisher.publish(version, part.items())

    def close(self) -> None:
        for end in (*self.exchanges, *self.publishers):
            end.close()


def split(model: Tensors) -> tuple[Tensors, Tensors]:
    names = sorted(model)
    return {n: model[n] for n in names[::2]}, {n: model[n] for n in names[1::2]}


def random_model(seed: int, dtype: torch.dtype = torch.float32) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(40, 7 + i, generator=draw).to(dtype) for i in range(5)}


def whole(model: Tensors) -> Any:
    """What one publisher with all of it would make."""
    return VersionStore().publish({name: to_bf16(tensor) for name, tensor in model.items()})


@pytest.fixture
def stages() -> Iterator[Stages]:
    started = Stages()
    yield started
    started.close()


def test_a_version_in_two_parts_is_the_version_of_one_publisher(stages: Stages) -> None:
    model, puller = random_model(1), None
    weights = None
    for version in (5, 6, 7):
        stages.publish(version, model)
        stages.publishers[0].wait()
        told = stages.broker.told[-1]
        assert (told.version, told.lineage, len(told.publishers)) == (version, "l", 2)
        assert told.digest == whole(model).digest
        puller = puller or WeightPuller(told.publishers)
        weights = puller.pull(weights, deadline_s=20)
        assert (weights.version, weights.digest) == (version, told.digest)
        for name, tensor in model.items():
            assert (weights.tensors[name].steps == to_bf16(tensor).reshape(-1)).all()
        model = {name: tensor + 0.001 * torch.randn_like(tensor) for name, tensor in model.items()}
    assert puller is not None
    puller.close()


def test_nothing_is_announced_before_the_last_part_is_complete(stages: Stages) -> None:
    first, second = split(random_model(1))
    stages.publishers[0].publish(5, first.items())
    held = threading.Event()
    stages.publishers[0]._thread.submit(held.set)  # behind the announcement
    assert not held.wait(0.2)
    assert stages.broker.told == []
    stages.publishers[1].publish(5, second.items())
    assert held.wait(10)
    assert [told.version for told in stages.broker.told] == [5]


def test_metrics_are_of_the_whole_model(stages: Stages) -> None:
    model = random_model(1)
    stages.publish(5, model)
    model = {**model, "layer.0": model["layer.0"] * 2}
    stages.publish(6, model)
    stages.publishers[0].wait()
    metrics = stages.coordinator.metrics
    num_values = sum(tensor.numel() for tensor in model.values())
    assert metrics["version"] == 6
    assert metrics["total_bytes"] == 2 * num_values
    assert metrics["changed_fraction"] == pytest.approx(40 * 7 / num_values)
    assert 0 < metrics["delta_bytes"] < metrics["total_bytes"]
    assert 0 < metrics["copy_s"] < 10
    assert 0 <= metrics["wait_s"] < 10


def test_a_step_waits_for_the_copy_and_not_for_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, may_go_on = VersionStore(), list[int](), threading.Event()
    publisher = RankPart(RunConfig(), store, None, lambda version, part: told.append(version))
    model, publish = random_model(1), store.publish

    def publish_later(*args: Any, **options: Any) -> Any:
        assert may_go_on.wait(20)
        return publish(*args, **options)

    monkeypatch.setattr(store, "publish", publish_later)
    try:
        for version in (0, 1, 2):
            may_go_on.clear()
            publisher.publish(version, model.items())
            assert told == list(range(version))
            expected = whole(model).digest
            for tensor in model.values():
                tensor.mul_(1.01)  # the next step
            may_go_on.set()
            publisher.wait()
            assert store.newest is not None
            assert store.newest.digest == expected
    finally:
        may_go_on.set()
        publisher.close()


def test_a_part_that_failed_is_named_by_its_rank_at_once(stages: Stages) -> None:
    first, _ = split(random_model(1))
    stages.publishers[1].publish(6, first.items())  # the next version here is 5
    stages.publishers[0].publish(5, first.items())
    stages.exchanges[1].post(5, 3, RankPartReport(problem="OSError: gone"))
    with pytest.raises(WeightsError, match="version 5 is not announced: rank 3 has no part of it: OSError: gone"):
        stages.publishers[0].wait()
    with pytest.raises(WeightsError, match="publish of version 6; the next one here is 5"):
        stages.publishers[1].wait()
    assert stages.broker.told == []


def test_two_ranks_with_a_tensor_of_one_name_are_refused(stages: Stages) -> None:
    model = random_model(1)
    for publisher in stages.publishers:
        publisher.publish(5, model.items())
    with pytest.raises(WeightsError, match="two ranks publish a tensor of one name"):
        stages.publishers[0].wait()
    assert stages.broker.told == []


def test_a_broker_that_forgot_the_version_is_told_again_with_all_publishers(stages: Stages) -> None:
    stages.publish(5, random_model(1))
    stages.publishers[0].wait()
    stages.coordinator.on_heartbeat("l", 5)
    stages.coordinator.on_heartbeat("other", 1)
    assert len(stages.broker.told) == 1
    stages.coordinator.on_heartbeat("l", 4)
    assert stages.broker.told[0] == stages.broker.told[1]


def test_files_of_the_timeline_before_stay_until_the_broker_knows_of_the_next(tmp_path: Path) -> None:
    class Gone(Broker):
        def call(self, message: Publish, *, timeout_s: float) -> None:
            raise WeightsError("superseded")

    old, chain = DiskChain(tmp_path, "old"), DiskChain(tmp_path, "l")

    def publish(broker: Broker) -> None:
        announcer = Coordinator(broker, "l", PartExchange(HashStore(), "l"), [], chain)  # type: ignore[arg-type]
        publisher = RankPart(RunConfig(), VersionStore(lineage="l"), None, announcer.announce, chain=chain)
        publisher.publish(0, random_model(1).items())
        publisher.wait()

    with pytest.raises(WeightsError, match="superseded"):
        publish(Gone())
    assert old.folder.exists()
    publish(broker := Broker())
    assert not old.folder.exists()
    assert broker.told[0].publishers == [chain.address]
    assert DiskPuller(chain.folder).pull(None, 1.0).digest == broker.told[0].digest == whole(random_model(1)).digest


def test_every_client_that_may_join_the_run_may_pull() -> None:
    publisher = RankPart(RunConfig(broker=BrokerConfig(max_clients=3_000)), VersionStore(lineage="l"), None, lambda version, part: None)
    assert publisher.server is not None
    assert publisher.server._server.limits.max_connections >= 3_000
    publisher.close()


def test_publishers_of_one_host_bind_ports_in_a_row() -> None:
    assert [bind_of("tcp://0.0.0.0:7000", place) for place in range(3)] == [
        "tcp://0.0.0.0:7000",
        "tcp://0.0.0.0:7001",
        "tcp://0.0.0.0:7002",
    ]
    assert bind_of("tcp://[::]:7000", 1) == "tcp://[::]:7001"
    assert bind_of("tcp://127.0.0.1:0", 3) == "tcp://127.0.0.1:0"


def test_a_rank_on_another_host_must_not_serve_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    check_reach("tcp://127.0.0.1:0")
    monkeypatch.setenv("GROUP_RANK", "1")
    check_reach("tcp://0.0.0.0:5600")
    with pytest.raises(ConfigError, match=r"weights.weights_bind tcp://127.0.0.1:0 can only be reached from this host"):
        check_reach("tcp://127.0.0.1:0")


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
]
Model = dict[str, torch.Tensor]

every_device = pytest.mark.parametrize("device", DEVICES)


def make_model(device: str) -> Model:
    torch.manual_seed(0)
    model = {
        "master": torch.randn(300, 40),
        "half": torch.randn(5000, dtype=torch.bfloat16),
        "norm": torch.ones(64),
        "scalar": torch.tensor(2.5),
    }
    model |= {"odd": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40]), "empty": torch.zeros(0, 3)}
    model["turned"] = torch.randn(30, 20).t()
    model = {name: tensor.to(device) for name, tensor in model.items()}
    return {**model, "half": torch.nn.Parameter(model["half"])}  # as a model's own: it wants gradients


@torch.no_grad()
def train(model: Model, fraction: float = 0.1) -> None:
    """A step in place: part of the values of some tensors move."""
    for name in ("master", "half", "turned"):
        moves = 1 + 0.01 * torch.randn(model[name].shape) * (torch.rand(model[name].shape) < fraction)
        model[name].mul_(moves.to(model[name]))


def published(store: VersionStore, name: str) -> np.ndarray:
    newest = store.newest
    assert newest is not None
    return np.frombuffer(store.read(store.lineage, newest.version, name, NO_BASE), np.uint16)


def assert_serves(store: VersionStore, model: Model) -> None:
    """The store has these values, and hashes of the same digest as one that was given them whole."""
    for name, tensor in model.items():
        assert np.array_equal(published(store, name), to_bf16(tensor).reshape(-1)), name
    whole = VersionStore().publish({name: to_bf16(tensor) for name, tensor in model.items()})
    assert store.newest is not None
    assert store.newest.digest == whole.digest


@every_device
def test_versions_are_the_rounded_weights_at_the_time_of_each_publish(device: str) -> None:
    snapshot, store, model = HostSnapshot(), VersionStore(), make_model(device)
    fractions = []
    for _ in range(4):
        taken = snapshot.copy_to_host(model.items())
        then = {name: tensor.clone() for name, tensor in model.items()}
        train(model)  # while the store has not read them yet
        fractions.append(store.publish(taken).changed_fraction)
        assert_serves(store, then)
    assert fractions[0] == 1.0
    assert all(0.02 < fraction < 0.15 for fraction in fractions[1:])


def test_the_host_uses_its_memory_again_and_takes_a_new_shape() -> None:
    snapshot, model = HostSnapshot(), {"a": torch.ones(3, 4), "b": torch.ones(5)}
    first = snapshot.copy_to_host(model.items())
    model["b"] = torch.zeros(2)
    second = snapshot.copy_to_host(model.items())
    assert second["a"] is not first["a"]
    assert np.shares_memory(first["a"], second["a"])
    assert second["b"].shape == (2,)


@every_device
def test_router_biases_are_published_in_float32(device: str) -> None:
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", 1 + torch.arange(8) * 1e-5
    taken = HostSnapshot().copy_to_host([(name, bias.to(device))])
    assert np.array_equal(taken[name], bias.numpy())
    store = VersionStore()
    assert store.publish(taken).changed_fraction == 1.0
    assert store.newest is not None
    assert np.array_equal(np.frombuffer(store.read(store.lineage, store.newest.version, name, NO_BASE), np.float32), bias.numpy())

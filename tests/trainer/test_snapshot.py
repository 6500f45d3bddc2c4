"""What a publish gets from the weights: bfloat16 that later steps do not touch, and from a device what changed, exactly."""

import numpy as np
import pytest
import torch

from slimebus.weights.rounding import to_bf16
from slimebus.weights.store import VersionStore
from slimebus.weights.tensors import NO_BASE, TensorChanges
from trainer.snapshot import DeviceSnapshot, HostSnapshot, Snapshot, snapshot_of

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
]
Model = dict[str, torch.Tensor]

every_device = pytest.mark.parametrize("device", DEVICES)
both = pytest.mark.parametrize("diff", ["host", "device"])


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


@both
@every_device
def test_versions_are_the_rounded_weights_at_the_time_of_each_publish(diff: str, device: str) -> None:
    snapshot, store, model = snapshot_of(diff), VersionStore(), make_model(device)
    fractions = []
    for _ in range(4):
        taken = snapshot.take(model.items(), store)
        then = {name: tensor.clone() for name, tensor in model.items()}
        train(model)  # while the store has not read them yet
        fractions.append(store.publish(taken).changed_fraction)
        assert_serves(store, then)
    assert fractions[0] == 1.0
    assert all(0.02 < fraction < 0.15 for fraction in fractions[1:])


@every_device
def test_both_make_the_same_versions_and_deltas(device: str) -> None:
    model, stores = make_model(device), (VersionStore(lineage="a"), VersionStore(lineage="a"))
    pairs: list[tuple[Snapshot, VersionStore]] = list(zip((HostSnapshot(), DeviceSnapshot()), stores, strict=True))
    for fraction in (0.0, 0.01, 0.3, 1.0, 0.0):
        train(model, fraction)
        made = [store.publish(snapshot.take(model.items(), store)) for snapshot, store in pairs]
        assert (made[0].digest, made[0].num_changed, made[0].delta_bytes) == (made[1].digest, made[1].num_changed, made[1].delta_bytes)
    assert stores[0].manifest("a", 1) == stores[1].manifest("a", 1)


def kinds(taken: dict) -> dict[str, bool]:
    return {name: isinstance(value, TensorChanges) for name, value in taken.items()}


def test_only_changes_leave_the_device_once_a_version_is_known() -> None:
    snapshot, store, model = DeviceSnapshot(), VersionStore(), make_model("cpu")
    first = snapshot.take(model.items(), store)
    assert not any(kinds(first).values())
    store.publish(first)
    train(model, 0.05)
    second = snapshot.take(model.items(), store)
    assert [name for name, steps in kinds(second).items() if not steps] == ["empty"]  # no values, no changes
    master = second["master"]
    assert isinstance(master, TensorChanges)
    assert sum(len(stream) for unit in master.units for stream in unit) < 0.15 * 2 * model["master"].numel()


def test_a_tensor_that_is_new_or_has_another_shape_or_changed_all_over_comes_whole() -> None:
    snapshot, store, model = DeviceSnapshot(), VersionStore(), make_model("cpu")
    store.publish(snapshot.take(model.items(), store))
    model |= {"new": torch.ones(9), "norm": torch.ones(2, 32), "half": torch.randn(5000, dtype=torch.bfloat16)}
    del model["odd"]
    taken = snapshot.take(model.items(), store)
    assert {name for name, steps in kinds(taken).items() if not steps} == {"new", "norm", "half", "empty"}
    store.publish(taken)
    assert_serves(store, model)
    model["odd"] = torch.zeros(5)
    train(model)
    taken = snapshot.take(model.items(), store)
    assert {name for name, steps in kinds(taken).items() if not steps} == {"odd", "empty"}
    store.publish(taken)
    assert_serves(store, model)


def test_after_any_failure_the_next_version_is_whole() -> None:
    snapshot, store, model = DeviceSnapshot(), VersionStore(), make_model("cpu")
    store.publish(snapshot.take(model.items(), store))

    def interrupted():
        train(model)
        yield "half", model["half"]
        raise MemoryError

    with pytest.raises(MemoryError):
        snapshot.take(interrupted(), store)
    recovered = snapshot.take(model.items(), store)
    assert not any(kinds(recovered).values())
    store.publish(recovered)
    train(model)
    snapshot.take(model.items(), store)  # and its publish never came about
    train(model)
    again = snapshot.take(model.items(), store)
    assert not any(kinds(again).values())
    store.publish(again)
    assert_serves(store, model)
    another = VersionStore(first_version=7)
    assert not any(kinds(snapshot.take(model.items(), another)).values())


def test_the_host_uses_its_memory_again_and_takes_a_new_shape() -> None:
    snapshot, store, model = HostSnapshot(), VersionStore(), {"a": torch.ones(3, 4), "b": torch.ones(5)}
    first = snapshot.take(model.items(), store)
    model["b"] = torch.zeros(2)
    second = snapshot.take(model.items(), store)
    assert second["a"] is not first["a"]
    assert np.shares_memory(first["a"], second["a"])
    assert second["b"].shape == (2,)

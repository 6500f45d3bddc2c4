"""What a publish gets from the weights: bfloat16 that later steps do not touch."""

import numpy as np
import pytest
import torch
from bf16 import to_bf16

from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import NO_BASE
from trainer.publish.snapshot import HostSnapshot

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
        taken = snapshot.take(model.items())
        then = {name: tensor.clone() for name, tensor in model.items()}
        train(model)  # while the store has not read them yet
        fractions.append(store.publish(taken).changed_fraction)
        assert_serves(store, then)
    assert fractions[0] == 1.0
    assert all(0.02 < fraction < 0.15 for fraction in fractions[1:])


def test_the_host_uses_its_memory_again_and_takes_a_new_shape() -> None:
    snapshot, model = HostSnapshot(), {"a": torch.ones(3, 4), "b": torch.ones(5)}
    first = snapshot.take(model.items())
    model["b"] = torch.zeros(2)
    second = snapshot.take(model.items())
    assert second["a"] is not first["a"]
    assert np.shares_memory(first["a"], second["a"])
    assert second["b"].shape == (2,)


@every_device
def test_router_biases_are_published_in_float32(device: str) -> None:
    name, bias = "model.layers.1.mlp.gate.e_score_correction_bias", 1 + torch.arange(8) * 1e-5
    taken = HostSnapshot().take([(name, bias.to(device))])
    assert np.array_equal(taken[name], bias.numpy())
    store = VersionStore()
    assert store.publish(taken).changed_fraction == 1.0
    assert store.newest is not None
    assert np.array_equal(np.frombuffer(store.read(store.lineage, store.newest.version, name, NO_BASE), np.float32), bias.numpy())

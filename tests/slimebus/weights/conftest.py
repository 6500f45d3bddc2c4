"""Small models whose versions change as training changes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import WeightServer
from slimebus.weights.tensors import TensorLike, Weights, as_tensor

Model = dict[str, TensorLike]


def make_model(seed: int = 0) -> Model:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.integers(0, 65536, (700, 64)).astype(np.uint16),
        "half": ("float16", (50, 40), rng.integers(0, 65536, 2000).astype(np.uint16)),
        "norm": rng.integers(0, 65536, 64).astype(np.uint16),
        "scale": rng.normal(size=8).astype(np.float32),
        "fp8": ("float8_e4m3fn", (32,), rng.integers(0, 256, 32).astype(np.uint8)),
        "step": np.array(3, np.int64),
        "scalar": np.array(0x3F80, np.uint16),
        "empty": np.zeros((0, 7), np.uint16),
        "fixed": rng.integers(0, 65536, 5000).astype(np.uint16),
    }


def train(model: Model, seed: int, fraction: float = 0.05) -> Model:
    """The next version: a fraction of the values of the stepped tensors moves, and the plain ones change."""
    rng = np.random.default_rng(seed)
    after = dict(model)
    for name in ("embed", "norm"):
        values = model[name]
        moves = np.where(rng.random(values.shape) < fraction, rng.integers(-2, 3, values.shape), 0)
        after[name] = (values + moves).astype(np.uint16)
    dtype, shape, values = model["half"]
    after["half"] = (dtype, shape, (values + (rng.random(values.shape) < fraction)).astype(np.uint16))
    after["scale"] = model["scale"] + np.float32(1)
    return after


def assert_serves(weights: Weights, model: Model) -> None:
    assert weights.tensors.keys() == model.keys()
    for name, value in model.items():
        expected, got = as_tensor(name, value), weights.tensors[name]
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        assert np.array_equal(got.buffer, expected.buffer), name


@pytest.fixture
def model() -> Model:
    return make_model()


@pytest.fixture
def after() -> Callable[..., Model]:
    return train


@pytest.fixture
def check() -> Callable[[Weights, Model], None]:
    return assert_serves


@pytest.fixture
def puller_of(closing: Any) -> Callable[..., WeightPuller]:
    """A puller of a store, which is served until the test is done."""
    return lambda store, **how: closing(WeightPuller([closing(WeightServer(store)).endpoint], **how))

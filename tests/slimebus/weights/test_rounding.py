"""What is published is exactly what torch rounds to."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slimebus.weights.rounding import from_tensor, rounded, to_bf16, to_tensor  # noqa: E402
from slimebus.weights.tensors import as_tensor  # noqa: E402


def test_float32_rounds_to_nearest_with_ties_to_even():
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, float("inf"), 3.4e38])
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x7F80]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (4, 6)])
def test_torch_tensors_round_trip_as_bytes(dtype, shape):
    given = (torch.arange(int(np.prod(shape))).reshape(shape) % 2).to(getattr(torch, dtype))
    tensor = to_tensor(given.t() if len(shape) == 2 else given)
    assert tensor.dtype == dtype
    back = from_tensor(tensor)
    assert back.dtype == given.dtype
    assert torch.equal(back.to(torch.float64), (given.t() if len(shape) == 2 else given).to(torch.float64))


def test_rounding_without_torch_gives_the_same_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    finite = values[~np.isnan(values)]
    mine = rounded(as_tensor("w", finite)).steps
    assert np.array_equal(mine, to_bf16(torch.from_numpy(finite)))
    nans = rounded(as_tensor("w", values[np.isnan(values)])).steps
    assert ((nans & 0x7FFF) > 0x7F80).all()

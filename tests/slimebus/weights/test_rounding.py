"""What is published is exactly what torch rounds to."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from slimebus.weights.rounding import from_tensor, to_bf16, to_tensor  # noqa: E402


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

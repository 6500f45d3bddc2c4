"""What is published is exactly what torch rounds to."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from bf16 import to_bf16  # noqa: E402

from slimebus.weights.tensors import as_tensor, rounded  # noqa: E402


def test_float32_rounds_to_nearest_with_ties_to_even():
    values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -0.0, float("inf"), 3.4e38])
    assert to_bf16(values).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0x8000, 0x7F80, 0x7F80]


def test_rounding_without_torch_gives_the_same_bits() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    for shaped in (values, values[:100_000].reshape(400, 250)):
        for given in (torch.from_numpy(shaped), torch.from_numpy(shaped).t() if shaped.ndim == 2 else torch.from_numpy(shaped[::3])):
            expected = to_bf16(given)
            assert np.array_equal(rounded(as_tensor("w", given.contiguous().numpy())).steps, expected.reshape(-1))
            assert set(expected[(expected & 0x7FFF) > 0x7F80].tolist()) == {0x7FC0}

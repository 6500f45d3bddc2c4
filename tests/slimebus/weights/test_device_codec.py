"""The codec on torch tensors makes the reference's payloads and takes them back. The CPU plays the GPU where there is none."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from bit_patterns import EDGE_STEPS, versions
from hypothesis import given, settings
from hypothesis import strategies as st

from slimebus.errors import WeightsError
from slimebus.weights import codec, device_codec
from slimebus.weights.kernel import load_kernel
from slimebus.weights.store import VersionStore

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")),
]
NUMPY = load_kernel("numpy")

every_device = pytest.mark.parametrize("device", DEVICES)


def on(device: str, values: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int16).copy()).to(device).view(dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().reshape(-1).view(torch.int16).numpy().view(np.uint16)


@every_device
@settings(max_examples=80, deadline=None)
@given(pair=versions(), zstd=st.booleans(), dtype=st.sampled_from([torch.bfloat16, torch.float16]))
def test_payloads_are_the_references_and_bring_back_the_target(device: str, pair: tuple, zstd: bool, dtype: torch.dtype) -> None:
    base, target = pair
    old, new = on(device, base, dtype), on(device, target, dtype)
    expected = codec.encode(base, target, zstd=zstd, kernel=NUMPY)
    assert device_codec.encode(old, new, zstd=zstd) == expected
    assert np.array_equal(bits(old), base)
    device_codec.apply(expected.payload, old)
    assert np.array_equal(bits(old), target)
    assert np.array_equal(bits(new), target)


@every_device
@pytest.mark.parametrize(("fraction", "steps"), [(0.01, [1, -1]), (0.3, EDGE_STEPS), (1.0, EDGE_STEPS[1:]), (1.0, [20000, -9999])])
def test_tensors_of_several_units_and_several_scans_are_one_payload(device: str, fraction: float, steps: list, monkeypatch) -> None:
    """Units of 1000 values, four of them scanned at once: nothing changes in the first, and only the last value of the second."""
    for module in (codec, device_codec):
        monkeypatch.setattr(module, "UNIT_VALUES", 1000)
    monkeypatch.setattr(device_codec, "AT_ONCE", 4000)
    rng = np.random.default_rng(7)
    base = rng.integers(0, 65536, 9_001).astype(np.uint16)
    target = (base + np.where(rng.random(len(base)) < fraction, rng.choice(steps, len(base)), 0)).astype(np.uint16)
    target[:1999] = base[:1999]
    target[1999] += 1
    expected = codec.encode(base, target, kernel=NUMPY)
    old = on(device, base)
    assert device_codec.encode(old, on(device, target), update=True) == expected
    assert np.array_equal(bits(old), target)
    applied = on(device, base)
    device_codec.apply(expected.payload, applied)
    assert np.array_equal(bits(applied), target)


@every_device
def test_more_than_a_unit_of_values(device: str) -> None:
    rng = np.random.default_rng(2)
    base = rng.integers(0, 65536, codec.UNIT_VALUES + 77).astype(np.uint16)
    target = (base + (rng.random(len(base)) < 0.01)).astype(np.uint16)
    old = on(device, base)
    encoded = device_codec.encode(old, on(device, target))
    assert encoded == codec.encode(base, target)
    device_codec.apply(encoded.payload, old)
    assert np.array_equal(bits(old), target)


@every_device
@settings(max_examples=40, deadline=None)
@given(pair=versions(), zstd=st.booleans())
def test_changes_found_on_a_device_move_the_hosts_copy_and_become_the_same_payload(device: str, pair: tuple, zstd: bool) -> None:
    base, target = pair
    held = base.copy()
    units = device_codec.scan(on(device, base), on(device, target))
    assert codec.encode_changes(held, units, zstd=zstd) == codec.encode(base, target, zstd=zstd, kernel=NUMPY)
    assert np.array_equal(held, target)


def test_changes_of_another_size_are_refused() -> None:
    units = device_codec.scan(on("cpu", np.zeros(300, np.uint16)), on("cpu", np.arange(300).astype(np.uint16)))
    with pytest.raises(WeightsError, match="do not fit"):
        codec.encode_changes(np.zeros(200, np.uint16), units)
    with pytest.raises(WeightsError, match="changes of 1 units"):
        codec.encode_changes(np.zeros(0, np.uint16), units)


@every_device
def test_any_shape_will_do_and_its_memory_is_written_in_place(device: str) -> None:
    for shape in ((), (0, 7), (1,), (3, 5, 7)):
        base, target = torch.randn(shape, dtype=torch.bfloat16, device=device), torch.randn(shape, dtype=torch.bfloat16, device=device)
        payload = device_codec.encode(base, target).payload
        assert payload == codec.encode(bits(base), bits(target)).payload
        flat = base.view(-1)
        device_codec.apply(payload, base)
        assert torch.equal(base, target)
        assert flat.data_ptr() == base.data_ptr()


def test_tensors_that_cannot_be_stepped_are_refused() -> None:
    half, single = torch.zeros(4, 4, dtype=torch.float16), torch.zeros(4, 4)
    with pytest.raises(WeightsError, match="expected two tensors alike"):
        device_codec.encode(half, half.bfloat16())
    with pytest.raises(WeightsError, match="expected two tensors alike"):
        device_codec.encode(half, half[:2])
    with pytest.raises(WeightsError, match="float32"):
        device_codec.encode(single, single)
    with pytest.raises(WeightsError, match="with strides"):
        device_codec.apply(b"", half.t()[1:])


def test_the_documents_example_does_what_it_says() -> None:
    text = (Path(__file__).parents[3] / "docs" / "weights.md").read_text()
    (example,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "device_codec" in block]
    base, target = torch.zeros(30, 7, dtype=torch.bfloat16), torch.ones(30, 7, dtype=torch.bfloat16)
    trained, store = target * 1.01, VersionStore()
    store.publish({"weight": bits(target).reshape(30, 7)})
    names = {"base": base, "target": target, "trained": trained, "store": store}
    exec(example, names)
    assert names["delta"].num_changed == 210
    assert torch.equal(base, trained)
    assert names["made"].hashes == VersionStore().publish({"weight": bits(trained).reshape(30, 7)}).hashes


@every_device
@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("fraction", [0.02, 0.6, 1.0])
def test_a_damaged_payload_does_what_it_does_to_the_reference_or_nothing(device: str, zstd: bool, fraction: float, monkeypatch) -> None:
    """Either both take it and end with the same values, or both refuse it, and then no value on the device was written."""
    monkeypatch.setattr(codec, "UNIT_VALUES", 1000)
    rng = np.random.default_rng(5)
    base = rng.integers(0, 65536, 4001).astype(np.uint16)
    largest = 30000 if fraction == 1.0 else 200
    steps = rng.integers(-largest, largest, len(base))
    target = (base + np.where(rng.random(len(base)) < fraction, steps, 0)).astype(np.uint16)
    payload = codec.encode(base, target, zstd=zstd).payload
    outcomes = {True: 0, False: 0}
    for _ in range(120):
        damaged = bytearray(payload)
        at = int(rng.integers(len(damaged)))
        if rng.random() < 0.8:
            damaged[at] ^= 1 << int(rng.integers(8))
        else:
            del damaged[at:]
        expected, got, refused = base.copy(), on(device, base), False
        with contextlib.suppress(WeightsError):
            refused = True
            codec.apply(damaged, expected, kernel=NUMPY)
            refused = False
        if refused:
            with pytest.raises(WeightsError):
                device_codec.apply(damaged, got)
            expected = base
        else:
            device_codec.apply(damaged, got)
        assert np.array_equal(bits(got), expected)
        outcomes[refused] += 1
    assert outcomes[True] > 5
    assert outcomes[False] > 5 or zstd

"""Every dtype, shape, size and memory layout comes back bit for bit, by every kernel with the same bytes."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from bit_patterns import kernels, leads
from delta_files import between
from hypothesis import given, settings
from hypothesis import strategies as st

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel
from slimebus.weights.files import delta_file
from slimebus.weights.files.delta_file import DeltaFile
from slimebus.weights.host.safetensors_file import as_weights
from slimebus.weights.messages import FULL, SAME
from slimebus.weights.tensors import DTYPE_BYTES, STEPPED_DTYPES, Tensor, Weights, as_tensor, tensor_bytes

KERNELS = kernels()
UNIT = delta_codec.UNIT_VALUES

# Both zeros, least and largest subnormals, infinities, quiet and signalling NaNs with payloads, the largest numbers.
SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x7F7F],
    "float16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x7BFF],
    "float32": [0, 0x80000000, 1, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF],
    "float64": [0, 1 << 63, 1, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000001, 0x7FF0000000000001, (1 << 64) - 1],
    "float8_e4m3fn": [0x00, 0x80, 0x01, 0x87, 0x7F, 0xFF, 0x7E],
    "float8_e5m2": [0x00, 0x80, 0x01, 0x83, 0x7C, 0xFC, 0x7D, 0xFF],
}
SHAPES = [(), (0,), (1,), (7,), (0, 5), (3, 0, 2), (5, 3), (2, 3, 4), (1, 1, 1, 1), (1000,)]


def tensor(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Any bytes at all, with the dtype's special values among them."""
    size = tensor_bytes("x", dtype, shape)
    buffer = rng.integers(0, 256, size).astype(np.uint8)
    if dtype == "bool":
        buffer &= 1
    special = SPECIAL.get(dtype)
    if special and size:
        width = np.dtype(f"<u{DTYPE_BYTES[dtype]}")
        values = buffer.view(width)
        chosen = rng.random(len(values)) < 0.3
        values[chosen] = rng.choice(np.array(special, width), int(chosen.sum()))
    return Tensor(dtype, shape, buffer)


def moved(rng: np.random.Generator, old: Tensor, change: str) -> Tensor:
    """The next version of a tensor."""
    if change == "none" or not len(old.buffer):
        return old
    if change == "all":
        return Tensor(old.dtype, old.shape, old.buffer ^ np.uint8(1))
    if change == "reshaped":
        return Tensor(old.dtype, (*old.shape, 1), old.buffer.copy())
    buffer = old.buffer.copy()
    places = rng.integers(0, len(buffer), max(1, len(buffer) // 50))
    buffer[places] ^= np.uint8(1)
    return Tensor(old.dtype, old.shape, buffer)


def led(base: Weights, target: Weights) -> Weights:
    """Base brought to target through a manifest and its payloads."""
    manifest, payloads = between(base, target)
    names = [entry.name for entry in manifest.tensors if entry.kind != SAME]
    return delta_file.apply(DeltaFile(manifest, {name: [p] for name, p in zip(names, payloads, strict=True)}), base)


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), change=st.sampled_from(["none", "some", "all", "reshaped", "new", "gone"]), seed=st.integers(0, 2**32)
)
def test_a_tensor_of_every_dtype_comes_back_bit_for_bit(dtype: str, shape: tuple[int, ...], change: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    old, other = tensor(rng, dtype, shape), tensor(rng, "bfloat16", (3,))
    before, after = {"x": old, "other": other}, {"x": moved(rng, old, change), "other": other}
    if change in ("new", "gone"):
        del (before if change == "new" else after)["x"]
    base, target = as_weights(before, lineage="L"), as_weights(after, lineage="L", version=1)
    got = led(base, target)
    assert (got.digest, got.tensors.keys()) == (target.digest, target.tensors.keys())
    for name, expected in target.tensors.items():
        assert (got.tensors[name].dtype, got.tensors[name].shape) == (expected.dtype, expected.shape)
        assert got.tensors[name].buffer.tobytes() == expected.buffer.tobytes()
    if "x" in after and change == "some" and dtype not in STEPPED_DTYPES and len(old.buffer):
        assert next(e.kind for e in between(base, target)[0].tensors if e.name == "x") == FULL, "others travel whole"


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", sorted(STEPPED_DTYPES))
def test_steps_between_any_two_special_values_are_exact(kernel: Kernel, dtype: str) -> None:
    pairs = np.array(list(itertools.product(SPECIAL[dtype], repeat=2)), np.uint16)
    base, target = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
    assert leads(delta_codec.encode(base, target, kernel=kernel).payload, base, target, kernel)


@pytest.mark.parametrize("size", [UNIT - 1, UNIT, UNIT + 1, 2 * UNIT + 1])
def test_every_kernel_agrees_at_the_edges_of_units(size: int) -> None:
    rng = np.random.default_rng(size)
    base = rng.integers(0, 65536, size).astype(np.uint16)
    edges = [place for place in (0, UNIT - 1, UNIT, 2 * UNIT - 1, 2 * UNIT, size - 1) if place < size]
    few, dense = base.copy(), base + (rng.random(size) < 0.4).astype(np.uint16)
    few[edges] += np.uint16(40000)
    for target in (base, few, dense, ~base):
        encoded = {delta_codec.encode(base, target, zstd=False, kernel=kernel) for kernel in KERNELS}
        assert len(encoded) == 1
        (encoded_once,) = encoded
        assert len(delta_codec.split_units(encoded_once.payload, size)) == -(-size // UNIT)
        for kernel in KERNELS:
            assert leads(encoded_once.payload, base, target, kernel)


def test_a_tensor_of_more_than_2_gib_is_encoded_applied_and_merged() -> None:
    """Pages that nobody wrote to take no memory."""
    size = (1 << 30) + 5
    places = [0, UNIT, (1 << 30) - 1, 1 << 30, size - 1]
    values, target = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
    target[places] = 9
    encoded = delta_codec.encode(values, target)
    assert encoded.num_changed == len(places)
    delta_codec.apply(encoded.payload, values)
    delta_codec.apply(delta_codec.merge([encoded.payload, encoded.payload], size).payload, values)
    assert values[places].tolist() == [27] * len(places)
    assert values[1] == values[size - 2] == 0


@pytest.mark.parametrize("length", range(1, 9))
def test_chains_of_any_length_merge_to_the_same_bytes_by_every_kernel(length: int) -> None:
    """Sparse, dense and full steps in turn; what comes before a full unit does not matter."""
    rng = np.random.default_rng(length)
    for size, zstd in itertools.product((1, 2, 333, 70_001), (False, True)):
        chain = [rng.integers(0, 65536, size).astype(np.uint16)]
        for fraction in rng.choice([0.0, 0.01, 0.4, 1.0], length):
            noise = rng.integers(0, 65536, size).astype(np.uint16)
            chain.append(chain[-1] + np.where(rng.random(size) < fraction, noise, 0).astype(np.uint16))
        payloads = [delta_codec.encode(a, b, zstd=zstd).payload for a, b in itertools.pairwise(chain)]
        merged = {delta_codec.merge(payloads, size, zstd=zstd, kernel=kernel) for kernel in KERNELS}
        assert len(merged) == 1
        (merged_once,) = merged
        for kernel in KERNELS:
            assert leads(merged_once.payload, chain[0], chain[-1], kernel)


def test_a_chain_that_leads_back_changes_nothing() -> None:
    rng = np.random.default_rng(8)
    there, away = rng.integers(0, 65536, 9000).astype(np.uint16), None
    away = there + (rng.random(9000) < 0.1).astype(np.uint16)
    payloads = [delta_codec.encode(there, away).payload, delta_codec.encode(away, there).payload] * 3
    for kernel in KERNELS:
        merged = delta_codec.merge(payloads, len(there), kernel=kernel)
        assert (merged.num_changed, len(merged.payload)) == (0, 10)
        assert leads(merged.payload, there, there, kernel)


def test_a_merge_of_nothing_is_refused() -> None:
    with pytest.raises(WeightsError, match="no payloads"):
        delta_codec.merge([], 5)


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "odd address": lambda values: np.frombuffer(bytearray(b"." + values.tobytes()), np.uint8)[1:].view(np.uint16),
    "strided": lambda values: np.repeat(values, 3)[::3],
    "backwards": lambda values: values[::-1].copy()[::-1],
    "big endian": lambda values: values.astype(">u2"),
}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_memory_layout_gives_the_same_bytes_and_only_a_plain_one_is_written_to(kernel: Kernel, layout: Any) -> None:
    rng = np.random.default_rng(9)
    base = rng.integers(0, 65536, 5001).astype(np.uint16)
    target = base + (rng.random(5001) < 0.1).astype(np.uint16)
    expected = delta_codec.encode(base, target, kernel=kernel)
    assert delta_codec.encode(layout(base), layout(target), kernel=kernel) == expected
    for write in (
        lambda: delta_codec.encode(layout(base), target, update=True, kernel=kernel),
        lambda: delta_codec.apply(expected.payload, layout(base), kernel=kernel),
    ):
        with pytest.raises(WeightsError, match="not aligned, native and without gaps"):
            write()
    applied = np.zeros(5001, np.uint16)
    delta_codec.apply(expected.payload, applied, base=layout(base), kernel=kernel)
    assert np.array_equal(applied, target)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_read_only_values_are_read_and_never_written(kernel: Kernel) -> None:
    base, target = np.arange(100, dtype=np.uint16), np.arange(100, dtype=np.uint16) + np.uint16(1)
    expected = delta_codec.encode(base, target, kernel=kernel)
    base.flags.writeable = target.flags.writeable = False
    assert delta_codec.encode(base, target, kernel=kernel) == expected
    for write in (
        lambda: delta_codec.encode(base, target, update=True, kernel=kernel),
        lambda: delta_codec.apply(expected.payload, base, kernel=kernel),
    ):
        with pytest.raises(WeightsError, match="read-only"):
            write()


@pytest.mark.parametrize("values", [np.zeros(8, np.uint8), np.zeros(8, np.int32), np.zeros((2, 4), np.uint16), np.zeros(8, np.float16)])
def test_values_that_are_not_flat_16_bit_patterns_are_refused(values: np.ndarray) -> None:
    """A kernel would read beyond them."""
    with pytest.raises(WeightsError, match=r"flat array of uint16|one length"):
        delta_codec.encode(values, values.copy())
    with pytest.raises(WeightsError, match="flat array of uint16"):
        delta_codec.apply(delta_codec.encode(np.zeros(8, np.uint16), np.ones(8, np.uint16)).payload, values)


def test_published_arrays_may_lie_in_memory_in_any_way() -> None:
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    little = as_tensor("x", values)
    for same in (values.astype(">f4"), np.asfortranarray(values), np.repeat(values, 2, axis=0)[::2], values[::-1][::-1]):
        got = as_tensor("x", same)
        assert (got.dtype, got.shape, got.buffer.tobytes()) == ("float32", (4, 6), little.buffer.tobytes())
    bits = np.arange(6, dtype=np.uint16)
    assert as_tensor("x", bits.astype(">u2")).dtype == "bfloat16"
    assert as_tensor("x", ("bfloat16", (6,), bits.astype(">u2"))).buffer.tobytes() == bits.tobytes()
    shape = as_tensor("x", ("bfloat16", (np.int64(2), 3), bits)).shape
    assert [type(size) for size in shape] == [int, int], "a manifest cannot say a numpy number"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (np.array([object()]), "dtype 'object'"),
        (np.zeros(2, np.complex64), "dtype 'complex64'"),
        (np.zeros(2, "datetime64[s]"), "dtype 'datetime64"),
        (("bf16", (1,), b"12"), "dtype 'bf16'"),
        (("bfloat16", (2**62, 2**62), b""), "expected"),
        (("bfloat16", (2**70,), b""), "sizes from 0"),
        (("bfloat16", (-1, -1), b"12"), "sizes from 0"),
        (("bfloat16", (1,) * 33, b"12"), "at most 32 sizes"),
        (("bfloat16", (2,), b"123"), "3 bytes for"),
    ],
)
def test_what_cannot_be_a_tensor_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(WeightsError, match=why) as refused:
        as_tensor("layer.7", value)
    assert "layer.7" in refused.value.text


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "\ud800", "a\x7f"])
def test_a_name_that_could_forge_a_line_of_the_digest_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="do not print"):
        as_tensor(name, np.zeros(3, np.uint16))


def test_a_shape_of_a_million_sizes_is_refused_at_once() -> None:
    with pytest.raises(WeightsError, match="at most 32 sizes"):
        tensor_bytes("x", "bfloat16", (2**62,) * 1_000_000)

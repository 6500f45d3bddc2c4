"""The codec keeps its promises on any bit pattern, with either kernel, and survives any bytes."""

import itertools
import math
import shutil

import numpy as np
import pytest
from bit_patterns import kernels, leads, versions
from hypothesis import given, settings
from hypothesis import strategies as st

from slimebus.bus.errors import WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.codec.kernel import Kernel

KERNELS = kernels()
all_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def perturbed(rng: np.random.Generator, base: np.ndarray, fraction: float, largest_step: int = 3) -> np.ndarray:
    steps = rng.integers(-largest_step, largest_step + 1, len(base))
    return (base + np.where(rng.random(len(base)) < fraction, steps, 0)).astype(np.uint16)


@pytest.mark.skipif(shutil.which("cc") is None and len(KERNELS) == 1, reason="no C compiler on this machine: the codec runs on numpy")
def test_the_compiled_kernel_is_built_and_in_use() -> None:
    assert delta_codec.codec_path().startswith("c (")


@settings(max_examples=150, deadline=None)
@given(versions(), st.booleans())
def test_every_kernel_gives_the_same_bytes_and_brings_back_the_target(pair: tuple[np.ndarray, np.ndarray], zstd: bool) -> None:
    base, target = pair
    payloads = {delta_codec.encode(base, target, zstd=zstd, kernel=kernel) for kernel in KERNELS}
    assert len(payloads) == 1
    (encoded,) = payloads
    assert encoded.num_changed == np.count_nonzero(base != target)
    assert len(encoded.payload) <= target.nbytes + delta_codec.MAX_HEADER_BYTES
    for kernel in KERNELS:
        assert leads(encoded.payload, base, target, kernel)


@all_kernels
@pytest.mark.parametrize("fraction", [0.0, 0.002, 0.02, 0.06, 0.3, 1.0])
def test_where_a_tensor_begins_and_ends_does_not_matter(kernel: Kernel, fraction: float) -> None:
    rng = np.random.default_rng(7)
    for start, size in itertools.product((0, 1, 15, 31, 32), (0, 1, 31, 511, 512, 513, 2100)):
        base = rng.integers(0, 65536, start + size).astype(np.uint16)[start:]
        target = perturbed(rng, base, fraction, 500)
        payload = delta_codec.encode(base, target, kernel=KERNELS[0]).payload
        assert delta_codec.encode(base, target, update=True, kernel=kernel).payload == payload
        assert np.array_equal(base, target)


@all_kernels
def test_a_copy_of_the_base_becomes_the_target_unit_by_unit(kernel: Kernel) -> None:
    rng = np.random.default_rng(8)
    base = rng.integers(0, 65536, delta_codec.UNIT_VALUES + 3000).astype(np.uint16)
    target = perturbed(rng, base, 0.01)
    target[delta_codec.UNIT_VALUES :] = rng.integers(0, 65536, 3000)  # a full unit
    payload, made, before = delta_codec.encode(base, target).payload, np.zeros_like(base), base.copy()
    done: list[np.ndarray] = []

    def take(unit: np.ndarray) -> None:
        if not done:
            assert not made[delta_codec.UNIT_VALUES :].any(), "the next unit is not begun before this one is taken"
        done.append(unit.copy())

    delta_codec.apply(payload, made, base=base, on_unit=take, kernel=kernel)
    assert [len(unit) for unit in done] == [delta_codec.UNIT_VALUES, 3000]
    assert np.array_equal(np.concatenate(done), target)
    assert np.array_equal(made, target)
    assert np.array_equal(base, before)
    with pytest.raises(WeightsError, match="within the header"):
        delta_codec.apply(payload[:5], made, base=base, kernel=kernel)


def test_the_form_follows_the_density() -> None:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 65536, 20_000).astype(np.uint16)
    forms = {}
    for fraction, step in ((0.0, 1), (0.02, 1), (0.7, 1), (1.0, 32767)):
        payload = delta_codec.encode(base, perturbed(rng, base, fraction, step)).payload
        forms[fraction] = delta_codec.split_units(payload, len(base))[0].kind
    assert forms == {0.0: delta_codec.SPARSE, 0.02: delta_codec.SPARSE, 0.7: delta_codec.DENSE, 1.0: delta_codec.FULL}


def test_arrays_of_two_lengths_are_refused() -> None:
    with pytest.raises(WeightsError, match="one length"):
        delta_codec.encode(np.zeros(3, np.uint16), np.zeros(4, np.uint16))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 5000))
def test_any_bytes_are_an_error(noise: bytes, num_values: int) -> None:
    if num_values == 0 and not noise:
        return
    with pytest.raises(WeightsError):
        delta_codec.apply(noise, np.zeros(num_values, np.uint16))


def test_a_zstd_frame_that_claims_more_than_its_unit_is_refused_before_it_is_expanded() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    num_values = 1000
    header = delta_codec.write_header(delta_codec.DENSE, [0, 0, 500, len(bomb), 0, 0, 0, 0])
    short = delta_codec.write_header(delta_codec.DENSE, [0, 0, 500, 400, 0, 0, 0, 0])
    with pytest.raises(WeightsError, match="impossible"):
        delta_codec.apply(header + bomb, np.zeros(num_values, np.uint16))
    with pytest.raises(WeightsError, match="zstd frame"):
        delta_codec.apply(short + (bomb + bytes(400))[:400], np.zeros(num_values, np.uint16))


def test_a_size_is_written_in_one_way_only() -> None:
    base = np.zeros(600, np.uint16)
    delta_codec.apply(bytes((2, 2, 0, 0, 0, 0, 0, 0, 0, 0)), base)
    for sizes in (b"\x80\x00" + bytes(7), b"\x80\x80\x80\x80\x01" + bytes(7), b"\xff" * 8):
        with pytest.raises(WeightsError, match=r"more bytes than it needs|impossible stream sizes|within the header"):
            delta_codec.apply(b"\x02\x02" + sizes, base)
    with pytest.raises(WeightsError, match="within the header"):
        delta_codec.apply(b"\x02\x02\x80", base)


@all_kernels
def test_streams_that_do_not_count_each_other_are_refused(kernel: Kernel) -> None:
    def u8(*values: int) -> np.ndarray:
        return np.array(values, np.uint8)

    values = np.zeros(600, np.uint16)
    none = u8()
    assert kernel.apply_sparse(values, u8(255, 255, 89), u8(2), none, none)
    assert values[599] == 1
    refused = [
        (u8(255, 255, 90), u8(2), none, none),  # a value beyond the last
        (u8(3, 255), u8(2), none, none),  # skips to nowhere
        (u8(3), u8(0x22), none, none),  # a step for no value
        (u8(3), none, none, none),
        (u8(3), u8(15), none, none),  # a wide that is missing
        (u8(3), u8(2), u8(1), none),  # a wide too many
        (u8(3), u8(15), u8(255), none),  # an escape that is missing
        (u8(3), u8(15), u8(255), u8(1)),  # half an escape
        (u8(3), u8(15), u8(1), u8(1, 2)),
        (u8(3), u8(0), none, none),  # a step of nothing, as a code and as escapes
        (u8(3), u8(15), u8(255), u8(0, 0)),
        (u8(3), u8(15), u8(255), u8(7, 0)),
    ]
    for streams in refused:
        assert not kernel.apply_sparse(values, *streams)
    assert np.count_nonzero(values) == 1
    odd = np.zeros(3, np.uint16)
    assert kernel.apply_dense(odd, u8(0x21, 0x04), none, none)
    assert odd.tolist() == [65535, 1, 2]
    assert not kernel.apply_dense(odd, u8(0x21, 0x14), none, none)
    assert not kernel.apply_dense(odd, u8(0x21), none, none)


def entropy_bytes(base: np.ndarray, target: np.ndarray) -> float:
    """The least that positions, log2 C(n, k) bits, and steps, k times their entropy, take."""
    n, steps = len(base), (target - base)[base != target]
    k = len(steps)
    positions = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    share = np.unique(steps, return_counts=True)[1] / k
    return (positions - k * float((share * np.log2(share)).sum())) / 8


@pytest.mark.parametrize("percent", [0.01, 0.03, 0.15, 0.25, 0.65, 4.6, 12, 25, 50])
def test_a_delta_is_little_larger_than_the_entropy_of_its_changes(percent: float) -> None:
    rng, n = np.random.default_rng(0), delta_codec.UNIT_VALUES
    base = rng.integers(0, 65536, n).astype(np.uint16)
    steps = np.where(rng.random(n) < 0.87, 1, rng.geometric(0.4, n) + 1) * rng.choice([-1, 1], n)
    target = np.where(rng.random(n) < percent / 100, base + steps, base).astype(np.uint16)
    payload = delta_codec.encode(base, target).payload
    assert len(payload) <= 1.1 * entropy_bytes(base, target)
    delta_codec.apply(payload, base)
    assert np.array_equal(base, target)

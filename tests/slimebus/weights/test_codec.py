"""The codec keeps its promises on any bit pattern, with either kernel, and survives any bytes."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest
from bit_patterns import kernels, versions
from hypothesis import given, settings
from hypothesis import strategies as st

from slimebus.errors import WeightsError
from slimebus.weights import codec
from slimebus.weights.kernel import Kernel, load_kernel

KERNELS = kernels()
all_kernels = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def perturbed(rng: np.random.Generator, base: np.ndarray, fraction: float, largest_step: int = 3) -> np.ndarray:
    steps = rng.integers(-largest_step, largest_step + 1, len(base))
    return (base + np.where(rng.random(len(base)) < fraction, steps, 0)).astype(np.uint16)


@pytest.mark.skipif(shutil.which("cc") is None and len(KERNELS) == 1, reason="no C compiler on this machine: the codec runs on numpy")
def test_the_compiled_kernel_is_built_and_in_use() -> None:
    assert load_kernel("c").name == codec.codec_path()


@settings(max_examples=150, deadline=None)
@given(versions(), st.booleans())
def test_every_kernel_gives_the_same_bytes_and_brings_back_the_target(pair: tuple[np.ndarray, np.ndarray], zstd: bool) -> None:
    base, target = pair
    payloads = {codec.encode(base, target, zstd=zstd, kernel=kernel) for kernel in KERNELS}
    assert len(payloads) == 1
    (encoded,) = payloads
    assert encoded.num_changed == np.count_nonzero(base != target)
    assert len(encoded.payload) <= target.nbytes + codec.HEADER.size
    for kernel in KERNELS:
        values = base.copy()
        codec.apply(encoded.payload, values, kernel=kernel)
        assert np.array_equal(values, target)


@settings(max_examples=60, deadline=None)
@given(versions(), st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0]), min_size=1, max_size=4), st.integers(0, 2**32))
def test_merge_is_one_delta_that_equals_the_chain(pair: tuple[np.ndarray, np.ndarray], fractions: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    chain = [*pair]
    for fraction in fractions:
        chain.append(perturbed(rng, chain[-1], fraction, 40000))
    payloads = [codec.encode(a, b).payload for a, b in itertools.pairwise(chain)]
    merged = {codec.merge(payloads, len(chain[0]), kernel=kernel) for kernel in KERNELS}
    assert len(merged) == 1
    values = chain[0].copy()
    codec.apply(merged.pop().payload, values)
    assert np.array_equal(values, chain[-1])


@all_kernels
def test_update_moves_the_base_to_the_target(kernel: Kernel) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 65536, 100_003).astype(np.uint16)
    target = perturbed(rng, base, 0.1, 500)
    codec.encode(base, target, update=True, kernel=kernel)
    assert np.array_equal(base, target)


@all_kernels
@pytest.mark.parametrize("fraction", [0.0, 0.002, 0.02, 0.06, 0.3, 1.0])
def test_where_a_tensor_begins_and_ends_does_not_matter(kernel: Kernel, fraction: float) -> None:
    rng = np.random.default_rng(7)
    for start, size in itertools.product((0, 1, 15, 31, 32), (0, 1, 31, 511, 512, 513, 2100)):
        base = rng.integers(0, 65536, start + size).astype(np.uint16)[start:]
        target = perturbed(rng, base, fraction, 500)
        payload = codec.encode(base, target, kernel=KERNELS[0]).payload
        assert codec.encode(base, target, update=True, kernel=kernel).payload == payload
        assert np.array_equal(base, target)


def test_tensors_of_several_units_round_trip_and_a_pool_changes_nothing() -> None:
    from concurrent.futures import ThreadPoolExecutor

    rng = np.random.default_rng(2)
    base = rng.integers(0, 65536, 2 * codec.UNIT_VALUES + 77).astype(np.uint16)
    target = perturbed(rng, base, 0.01)
    target[: codec.UNIT_VALUES] = base[: codec.UNIT_VALUES]
    with ThreadPoolExecutor(2) as pool:
        encoded = codec.encode(base, target, pool=pool)
        assert encoded == codec.encode(base, target)
        codec.apply(encoded.payload, base, pool=pool)
    assert np.array_equal(base, target)


@all_kernels
def test_a_copy_of_the_base_becomes_the_target_unit_by_unit(kernel: Kernel) -> None:
    rng = np.random.default_rng(8)
    base = rng.integers(0, 65536, codec.UNIT_VALUES + 3000).astype(np.uint16)
    target = perturbed(rng, base, 0.01)
    target[codec.UNIT_VALUES :] = rng.integers(0, 65536, 3000)  # a full unit
    payload, made, before = codec.encode(base, target).payload, np.zeros_like(base), base.copy()
    parts = codec.apply_to_copy(payload, base, made, kernel=kernel)
    assert np.array_equal(next(parts), target[: codec.UNIT_VALUES])
    assert not made[codec.UNIT_VALUES :].any(), "the next unit is not begun before it is asked for"
    assert np.array_equal(next(parts), target[codec.UNIT_VALUES :])
    assert np.array_equal(made, target)
    assert np.array_equal(base, before)
    with pytest.raises(WeightsError, match="within the header"):
        list(codec.apply_to_copy(payload[:20], base, made, kernel=kernel))


def test_the_form_follows_the_density() -> None:
    rng = np.random.default_rng(3)
    base = rng.integers(0, 65536, 20_000).astype(np.uint16)
    forms = {}
    for fraction, step in ((0.0, 1), (0.02, 1), (0.7, 1), (1.0, 32767)):
        payload = codec.encode(base, perturbed(rng, base, fraction, step)).payload
        forms[fraction] = codec.split_units(payload, len(base))[0].kind
    assert forms == {0.0: codec.SPARSE, 0.02: codec.SPARSE, 0.7: codec.DENSE, 1.0: codec.FULL}


def test_a_small_change_costs_less_than_seven_tenths_of_the_changed_fraction() -> None:
    rng = np.random.default_rng(4)
    base = rng.integers(0, 65536, 1 << 20).astype(np.uint16)
    target = perturbed(rng, base, 0.015, 1)
    encoded = codec.encode(base, target)
    assert len(encoded.payload) / base.nbytes <= 0.7 * encoded.num_changed / len(base)


def test_arrays_of_two_lengths_are_refused() -> None:
    with pytest.raises(WeightsError, match="one length"):
        codec.encode(np.zeros(3, np.uint16), np.zeros(4, np.uint16))


@all_kernels
@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("fraction", [0.02, 0.6, 1.0])
def test_damaged_payloads_are_an_error_or_harmless(kernel: Kernel, zstd: bool, fraction: float) -> None:
    """A flipped step is a valid payload for another target (checksums catch it); nothing else may pass, and nothing may crash."""
    rng = np.random.default_rng(5)
    base = rng.integers(0, 65536, 4001).astype(np.uint16)
    payload = codec.encode(base, perturbed(rng, base, fraction, 30000 if fraction == 1.0 else 200), zstd=zstd).payload
    guard = np.full(64, 0xABCD, np.uint16)
    for _ in range(400):
        damaged = _damage(rng, payload)
        arena = np.concatenate([guard, base, guard])
        with contextlib.suppress(WeightsError):
            codec.apply(damaged, arena[64:-64], kernel=kernel)
        assert np.array_equal(arena[:64], guard)
        assert np.array_equal(arena[-64:], guard)


def _damage(rng: np.random.Generator, payload: bytes) -> bytes:
    damaged = bytearray(payload)
    match rng.integers(0, 5):
        case 0:  # a bit
            damaged[rng.integers(len(damaged))] ^= 1 << rng.integers(8)
        case 1:  # a size that lies
            at = 4 + 4 * int(rng.integers(9))
            damaged[at : at + 4] = int(rng.choice([0, 1, 255, 4000, 4002, 2**31, 2**32 - 1])).to_bytes(4, "little")
        case 2:
            del damaged[rng.integers(len(damaged)) :]
        case 3:
            damaged += bytes(rng.integers(0, 256, rng.integers(1, 50), dtype=np.uint8))
        case _:  # a run of noise
            at = int(rng.integers(len(damaged)))
            noise = rng.integers(0, 256, min(16, len(damaged) - at), dtype=np.uint8)
            damaged[at : at + len(noise)] = noise.tobytes()
    return bytes(damaged)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 5000))
def test_any_bytes_are_an_error(noise: bytes, num_values: int) -> None:
    if num_values == 0 and not noise:
        return
    with pytest.raises(WeightsError):
        codec.apply(noise, np.zeros(num_values, np.uint16))


def test_a_zstd_frame_that_claims_more_than_its_unit_is_refused_before_it_is_expanded() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    num_values = 1000
    header = codec.HEADER.pack(codec.DENSE, codec.FORMAT, 0, num_values, 0, 0, 500, len(bomb), 0, 0, 0, 0)
    short = codec.HEADER.pack(codec.DENSE, codec.FORMAT, 0, num_values, 0, 0, 500, 400, 0, 0, 0, 0)
    with pytest.raises(WeightsError, match="impossible"):
        codec.apply(header + bomb, np.zeros(num_values, np.uint16))
    with pytest.raises(WeightsError, match="zstd frame"):
        codec.apply(short + (bomb + bytes(400))[:400], np.zeros(num_values, np.uint16))


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
    ]
    for streams in refused:
        assert not kernel.apply_sparse(values, *streams)
    assert np.count_nonzero(values) == 1
    odd = np.zeros(3, np.uint16)
    assert kernel.apply_dense(odd, u8(0x21, 0x04), none, none)
    assert odd.tolist() == [65535, 1, 2]
    assert not kernel.apply_dense(odd, u8(0x21, 0x14), none, none)
    assert not kernel.apply_dense(odd, u8(0x21), none, none)

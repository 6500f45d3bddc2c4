import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimebus.bus.errors import ProtocolError
from slimebus.bus.messages import NO_VERSION
from slimebus.bus.sample_table import oldest_version
from slimebus.bus.samples import Sample, decode_group, encode_group


def sample(prompt: int, response: int, version: int = 3, **extras: np.ndarray) -> Sample:
    length = prompt + response
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0] * prompt + [1] * response, np.uint8),
        rollout_logprobs=-np.arange(length, dtype=np.float32) / 7,
        versions=[(NO_VERSION, prompt), (version, response)],
        reward=0.5,
        extras=extras,
    )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=8))
def test_a_group_survives_the_wire(shapes: list[tuple[int, int, int]]) -> None:
    samples = [sample(p, r, v, experts=np.full((p + r, 2), v, np.int16)) for p, r, v in shapes]
    frames = encode_group(samples)
    assert len(frames) == 1 + 4
    for before, after in zip(samples, decode_group(frames), strict=True):
        for name in ("tokens", "loss_mask", "rollout_logprobs"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
        assert np.array_equal(before.extras["experts"], after.extras["experts"])
        kept = [run for run in before.versions if run[1]]
        assert (kept, before.reward, before.status) == (after.versions, after.reward, after.status)


@pytest.mark.parametrize("shape", [(3,), (1,), ()])
def test_bfloat16_arrives_as_the_float32_of_its_bits(shape: tuple[int, ...]) -> None:
    frames = encode_group([sample(1, 2, x=np.full(shape, 0xBFC0, np.uint16))])
    frames[0] = frames[0].replace(b"\xa6uint16", b"\xa8bfloat16")
    (back,) = decode_group(frames)
    assert (back.extras["x"].dtype, back.extras["x"].shape) == (np.float32, shape)
    assert np.all(back.extras["x"] == -1.5)


def test_oldest_version_counts_trainable_tokens_only() -> None:
    mask = np.array([0, 0, 1, 1, 1], np.uint8)
    assert oldest_version([(1, 2), (5, 1), (4, 2)], mask) == 4
    assert oldest_version([(NO_VERSION, 5)], mask) == NO_VERSION
    assert oldest_version([(0, 2), (NO_VERSION, 3)], mask) == NO_VERSION


def test_token_arrays_of_different_length_are_refused() -> None:
    bad = sample(2, 3)
    bad.loss_mask = bad.loss_mask[:-1]
    with pytest.raises(ProtocolError, match="must have one length"):
        encode_group([bad])


def test_an_extra_field_must_be_on_every_sample() -> None:
    with pytest.raises(ProtocolError, match="'pixels' is missing from a sample"):
        encode_group([sample(1, 1, pixels=np.zeros(3, np.uint8)), sample(1, 1)])

"""Records with late fields, or with some of their fields."""

import msgspec
import numpy as np
import pytest

from broker.store.reply_frames import assembled
from slimebus.bus.samples import Sample, decode_group, encode_field, encode_group


def sample(length: int) -> Sample:
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        rollout_logprobs=np.zeros(length, np.float32),
        versions=[(0, length)],
        reward=1.0,
        extras={"experts": np.full((length, 2), 7, np.uint8), "pixels": np.zeros((3, 3), np.float16)},
    )


def record() -> list[bytes]:
    return encode_group([sample(4), sample(6)])


def late() -> list[tuple[object, bytes]]:
    return [
        encode_field("values", [np.full(4, 0.5, np.float32), np.full(6, 0.25, np.float32)]),
        encode_field("score", [np.float64(1), np.float64(2)]),
    ]


def test_late_fields_stand_behind_those_of_the_put() -> None:
    first, second = decode_group(assembled(record(), late(), None))
    assert sorted(first.extras) == ["experts", "pixels", "score", "values"]
    assert second.extras["values"].tolist() == [0.25] * 6
    assert first.extras["score"].shape == ()
    assert second.extras["experts"].shape == (6, 2)


@pytest.mark.parametrize("only", [(), ("values",), ("experts", "values"), ("unknown",)])
def test_only_the_fields_that_are_wanted_are_sent(only: tuple[str, ...]) -> None:
    (first, _) = decode_group(assembled(record(), late(), only))
    assert sorted(first.extras) == sorted(set(only) & {"experts", "values"})
    assert first.tokens.tolist() == [0, 1, 2, 3]


def test_keys_of_a_newer_release_stay_in_the_header() -> None:
    frames = record()
    header = msgspec.msgpack.decode(frames[0]) | {"colour": "blue"}
    frames[0] = msgspec.msgpack.encode(header)
    assert msgspec.msgpack.decode(assembled(frames, late(), None)[0])["colour"] == "blue"

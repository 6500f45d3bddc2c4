"""What a put may not say of its samples, and that nothing else can be said in bytes."""

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import made

from slimebus.bus.sample_table import MAX_ELEMENTS, MAX_SAMPLES, BadSamples, check_group, decode_fields
from slimebus.bus.samples import decode_group, encode_group

LENGTHS = [4, 6, 5, 4]


def table(**changes: Any) -> dict[str, Any]:
    """Of a good group of four samples, with other columns."""
    fields = [
        {"name": "tokens", "dtype": "int32"},
        {"name": "loss_mask", "dtype": "uint8"},
        {"name": "rollout_logprobs", "dtype": "float32"},
    ]
    columns = {"num_tokens": LENGTHS, "versions": [[[-1, 1], [3, n - 1]] for n in LENGTHS], "fields": fields, "reward": [1.0, 0.0, 0.5, 1]}
    return columns | changes


def arrays() -> list[bytes]:
    total = sum(LENGTHS)
    return [bytes(4 * total), b"\1" * total, bytes(4 * total)]


def fields(*more: dict[str, Any], **token_field: Any) -> list[dict[str, Any]]:
    """The fields of a group, those of a name changed, and more."""
    return [field | token_field.get(field["name"], {}) for field in table()["fields"]] + list(more)


def pages(**changes: Any) -> dict[str, Any]:
    return {"name": "pages", "dtype": "int16", "shapes": [[2, 1]] * 4} | changes


PAGES = bytes(16)
BAD: dict[str, tuple[dict[str, Any], list[bytes], str]] = {
    "a short frame": (table(), [arrays()[0][:-1], *arrays()[1:]], "field 'tokens': a frame of 75 bytes; its dtype and shapes make 76"),
    "no fields": (table(fields=[]), [], "field 'tokens' is missing"),
    "no logprobs": (table(fields=fields()[:2]), arrays()[:2], "field 'rollout_logprobs' is missing; every group has tokens"),
    "int64 tokens": (
        table(fields=fields(tokens={"dtype": "int64"})),
        [bytes(152), *arrays()[1:]],
        "field 'tokens': dtype 'int64'; expected int32",
    ),
    "a bool mask": (table(fields=fields(loss_mask={"dtype": "int8"})), arrays(), "field 'loss_mask': dtype 'int8'; expected uint8"),
    "a mask of 2": (table(), [arrays()[0], b"\2" * 19, arrays()[2]], "field 'loss_mask': a value of 2; expected 0 or 1"),
    "a complex field": (table(fields=fields(pages(dtype="complex64"))), [*arrays(), PAGES], "'pages': dtype 'complex64'; expected one of"),
    "an object field": (table(fields=fields(pages(dtype="O"))), [*arrays(), PAGES], "'pages': dtype 'O'"),
    "3 shapes of 4": (table(fields=fields(pages(shapes=[[2, 1]] * 3))), [*arrays(), PAGES], "3 shapes for 4 samples"),
    "other token shapes": (table(fields=fields(tokens={"shapes": [[5], [5], [5], [4]]})), arrays(), "not the .num_tokens. of each sample"),
    "a negative dimension": (table(fields=fields(pages(shapes=[[-2, -1]] * 4))), [*arrays(), PAGES], r"sample 0: shape \[-2, -1\]"),
    "a product that overflows": (
        table(fields=fields(pages(shapes=[[0, 2**31 - 1, 2**31 - 1, 2**31 - 1]] * 4))),
        [*arrays(), b""],
        "elements",
    ),
    "many dimensions": (table(fields=fields(pages(shapes=[[1] * 9] * 4))), [*arrays(), bytes(8)], "at most 8 dimensions"),
    "a field twice": (table(fields=fields(pages(), pages())), [*arrays(), PAGES, PAGES], "field 'pages' stands 2 times"),
    "a name of a newline": (table(fields=fields(pages(name="a\nb"))), [*arrays(), PAGES], "printable ASCII"),
    "no name": (table(fields=fields(pages(name=""))), [*arrays(), PAGES], "its name"),
    "a frame too many": (table(), [*arrays(), b""], "4 bulk frames behind the first for 3 fields"),
    "an unknown status": (table(status=["great"] * 4), arrays(), "matching regex .*completed.* - at `\\$.status\\[0\\]`"),
    "a NaN reward": (table(reward=[float("nan")] * 4), arrays(), "Expected `float` >= -1e.30 - at `\\$.reward\\[0\\]`, got nan"),
    "an endless reward": (table(reward=[0.0, float("inf"), 0.0, 0.0]), arrays(), "Expected `float` <= 1e.30 - at `\\$.reward\\[1\\]`"),
    "temperature 0": (table(temperature=[1.0, 0.0, 1.0, 1.0]), arrays(), "Expected `float` >= 0.001 - at `\\$.temperature\\[1\\]`"),
    "a NaN temperature": (table(temperature=[float("nan")] * 4), arrays(), "Expected `float` >= 0.001 - at `\\$.temperature"),
    "a temperature that is 0 in float32": (table(temperature=[5e-324] * 4), arrays(), "Expected `float` >= 0.001 - at `\\$.temperature"),
    "a temperature that float32 has not": (table(temperature=[1e308] * 4), arrays(), "Expected `float` <= 1000.0 - at `\\$.temperature"),
    "a reward of no sum": (table(reward=[1e308, -1e308, 1e308, 0.0]), arrays(), "Expected `float` <= 1e.30 - at `\\$.reward\\[0\\]`"),
    "a run of no tokens": (
        table(versions=[[[3, 0], [3, 4]], *table()["versions"][1:]]),
        arrays(),
        "Expected `int` >= 1 - at `\\$.versions",
    ),
    "3 rewards of 4": (table(reward=[1.0] * 3), arrays(), "column 'reward' has 3 entries for 4 samples"),
    "no versions": (table(versions=[]), arrays(), "column 'versions' has 0 entries"),
    "runs that fall short": (table(versions=[[[3, 3]], *table()["versions"][1:]]), arrays(), "sample 0: version runs"),
    "a negative run": (table(versions=[[[3, 5], [3, -1]], *table()["versions"][1:]]), arrays(), "Expected `int` >= 1"),
    "a version of -2": (table(versions=[[[-2, 4]], *table()["versions"][1:]]), arrays(), "Expected `int` >= -1"),
    "a version never published": (table(versions=[[[8, 4]], *table()["versions"][1:]]), arrays(), "version 8, but 7 is the newest"),
    "a negative length": (table(num_tokens=[-4, 6, 5, 4]), arrays(), "Expected `int` >= 0 - at `\\$.num_tokens\\[0\\]`"),
    "3 samples of 4": (
        table(num_tokens=LENGTHS[:3], versions=table()["versions"][:3], reward=[]),
        [bytes(60), b"\1" * 15, bytes(60)],
        "3 samples of 3 attempts .* the lease is of 4",
    ),
    "5 samples of 4": (
        table(num_tokens=[*LENGTHS, 1], versions=[*table()["versions"], [[3, 1]]], reward=[]),
        [bytes(80), b"\1" * 20, bytes(80)],
        "5 samples of 5 attempts .* the lease is of 4",
    ),
    "an attempt too high": (table(trajectory=[0, 1, 2, 4]), arrays(), "the lease is of 4"),
    "a turn below 0": (table(turn=[-1] * 4), arrays(), "Expected `int` >= 0 - at `\\$.turn"),
    "text for a number": (table(num_tokens=["4"] * 4), arrays(), "bulk frame 0: Expected `int`"),
    "a list of lists for metadata": (table(metadata=[{"a": [1]}] * 4), arrays(), "bulk frame 0"),
}


def check(columns: dict[str, Any], behind: list[bytes]) -> Any:
    return check_group([msgpack.packb(columns), *behind], num_samples=4, newest=7, max_bytes=1 << 20)


@pytest.mark.parametrize("what", BAD)
def test_what_a_trainer_could_not_read_is_refused_with_the_place_and_what_was_expected(what: str) -> None:
    columns, behind, says = BAD[what]
    with pytest.raises(BadSamples, match=says):
        check(columns, behind)


def test_a_good_group_is_taken_and_its_oldest_version_is_that_of_its_trained_tokens() -> None:
    columns = table(versions=[[[2, 1], [3, 3]], *table()["versions"][1:]], fields=fields(pages()))
    mask = bytes([0, 1, 1, 1]) + b"\1" * 15
    found = check(columns, [arrays()[0], mask, arrays()[2], PAGES])
    assert [s.oldest_version for s in found.samples] == [3, 3, 3, 3], "the token of version 2 is not trained"
    assert [s.reward for s in found.samples] == [1.0, 0.0, 0.5, 1.0], "an int stands for a float"
    assert found.extras == ["pages"]


def test_an_attempt_may_give_several_samples_when_they_say_so() -> None:
    many = [made((3, 2), trajectory=i // 3) for i in range(12)]
    assert len(check_group(encode_group(many), num_samples=4).samples) == 12
    with pytest.raises(BadSamples, match="the lease is of 3"):
        check_group(encode_group(many), num_samples=3)


def test_a_group_of_a_hundred_thousand_samples_crosses_and_one_more_does_not() -> None:
    one = made((3, 2))
    frames = encode_group([one] * MAX_SAMPLES)
    assert len(check_group(frames, num_samples=MAX_SAMPLES, max_bytes=1 << 30).samples) == MAX_SAMPLES
    with pytest.raises(BadSamples, match="length <= 100000"):
        check_group(encode_group([one] * (MAX_SAMPLES + 1)))


def test_a_group_of_too_many_bytes_names_the_setting() -> None:
    with pytest.raises(BadSamples, match=r"at most 10 can be fetched \(broker.max_message_mib\)"):
        check_group(encode_group([made((3, 2))]), max_bytes=10)


def test_a_late_field_twice_or_none_is_refused() -> None:
    one = {"name": "v", "dtype": "uint8"}
    for described, behind in (([one, one], [b"", b""]), ([], []), ([one], [])):
        with pytest.raises(BadSamples):
            decode_fields([msgpack.packb(described), *behind])


WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.lists(st.integers(-3, MAX_ELEMENTS), max_size=5),
    st.lists(st.lists(st.integers(-2, 9), max_size=3), max_size=5),
    st.lists(st.sampled_from(["completed", "failed", "great"]), min_size=4, max_size=4),
    st.lists(st.floats(), min_size=4, max_size=4),
    st.lists(st.integers(-2, 6), min_size=4, max_size=4),
    st.just([pages()]),
)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_passes_the_check_can_be_read_by_the_trainer(data: Any) -> None:
    columns = table(fields=fields(pages()))
    behind = [*arrays(), PAGES]
    for _ in range(data.draw(st.integers(0, 3))):
        name = data.draw(st.sampled_from([*columns, "status", "temperature", "trajectory", "session", "turn", "metadata"]))
        columns[name] = data.draw(WRONG)
    if isinstance(columns["fields"], list) and columns["fields"] and data.draw(st.booleans()):
        changed = dict(data.draw(st.sampled_from(columns["fields"]))) if isinstance(columns["fields"][0], dict) else {}
        changed[data.draw(st.sampled_from(["name", "dtype", "shapes"]))] = data.draw(WRONG)
        columns["fields"] = [*columns["fields"], changed]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(behind) - 1))
        behind[at] = data.draw(st.binary(max_size=40)) if data.draw(st.booleans()) else behind[at] + b"\1"
    frame = bytearray(msgpack.packb(columns))
    if data.draw(st.booleans()):
        frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    frames = [bytes(frame), *behind]
    try:
        found = check_group(frames, num_samples=4, newest=7, max_bytes=1 << 20)
    except BadSamples:
        return
    samples = decode_group(frames)
    assert len(samples) == len(found.samples) >= 4
    assert all(
        len(s.tokens) == len(s.loss_mask) == len(s.rollout_logprobs) == f.num_tokens for s, f in zip(samples, found.samples, strict=True)
    )


def test_the_oldest_version_of_a_token_each_is_found_in_the_time_of_one_look() -> None:
    count = 300_000
    columns = table(num_tokens=[count, 6, 5, 4], versions=[[[7 - i % 5, 1] for i in range(count)], *table()["versions"][1:]])
    total = count + 15
    mask = b"\0\0\0\0" + b"\1" + bytes(count - 5) + b"\1" * 15
    found = check_group([msgpack.packb(columns), bytes(4 * total), mask, bytes(4 * total)], num_samples=4, newest=7)
    assert found.samples[0].oldest_version == 3, "token 4 alone is trained"

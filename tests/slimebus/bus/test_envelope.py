"""Envelopes: every message has a byte-exact example, and nothing else gets through."""

import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from message_examples import EXAMPLES

from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.errors import Fenced, ProtocolError, SlimebusError

GOLDEN = Path(__file__).parent / "golden"
PROTOCOL = Path(__file__).parents[3] / "docs" / "protocol.md"


def _encode(message: m.Message) -> bytes:
    return envelope.encode(message, id=7, run="demo", sender="w1", epoch=3)


def _golden(message: m.Message) -> Path:
    return GOLDEN / f"{m.wire_name(type(message))}.msgpack"


def test_every_message_has_an_example() -> None:
    assert {m.wire_name(type(example)) for example in EXAMPLES} == set(m.TYPES)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: m.wire_name(type(e)))
def test_the_bytes_of_a_message_never_change(example: m.Message) -> None:
    if os.environ.get("SLIMEBUS_WRITE_GOLDEN"):
        _golden(example).write_bytes(_encode(example))
    golden = _golden(example).read_bytes()
    assert _encode(example) == golden
    got = envelope.decode([golden, b"bulk"])
    assert (got.message, got.header.id, got.header.run, got.header.sender, got.header.epoch) == (example, 7, "demo", "w1", 3)
    assert list(got.bulk) == [b"bulk"]


def test_the_bytes_in_the_protocol_document_are_the_golden_ones() -> None:
    found = re.findall(r"<!-- golden: (\w+) -->\n```\n([0-9a-f\s]+)```", PROTOCOL.read_text())
    assert found, "docs/protocol.md shows no bytes"
    for name, shown in found:
        assert bytes.fromhex(shown) == (GOLDEN / f"{name}.msgpack").read_bytes(), name


def test_every_message_and_field_stands_in_the_protocol_document() -> None:
    text = PROTOCOL.read_text()
    for name, cls in m.TYPES.items():
        assert f"### `{name}`" in text, f"docs/protocol.md has no section for {name}"
        section = text.split(f"### `{name}`", 1)[1].split("\n### ", 1)[0]
        for field in msgspec.structs.fields(cls):
            assert f"`{field.name}`" in section, f"docs/protocol.md: {name} does not describe {field.name}"


def test_a_header_beyond_256_kib_is_refused_on_both_sides() -> None:
    with pytest.raises(ProtocolError, match="262144"):
        _encode(m.Finish(reason="x" * 270_000))
    with pytest.raises(ProtocolError, match="262144"):
        envelope.decode([b"\x00" * 270_000])


NAMES = [f"import/{'x' * (m.MAX_GROUP_BYTES - 17)}/{i:09d}" for i in range(m.MAX_BATCH_SIZE)]


@pytest.mark.parametrize(
    "message",
    [
        m.BatchReply(
            step=1 << 31,
            groups=[m.BatchGroup(group=n, num_samples=100_000, num_tokens=1 << 31, oldest_version=1 << 31) for n in NAMES],
        ),
        m.Fetch(groups=NAMES),
        m.Commit(step=1 << 31, unused=dict.fromkeys(NAMES, "zero_variance, or another reason")),
        m.Reject(step=1 << 31, groups=dict.fromkeys(NAMES[:100], "\U0001f600" * 300)),
        m.Edit(action="drop", groups=NAMES[:100]),
    ],
    ids=lambda message: m.wire_name(type(message)),
)
def test_the_largest_batch_with_the_longest_names_fits_one_header(message: m.Message) -> None:
    assert envelope.decode([_encode(message)]).message == message


def _refusal(frame: bytes) -> str:
    try:
        envelope.decode([frame])
    except ProtocolError as refused:
        return refused.code
    return ""


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_a_protocol_error(frame: bytes) -> None:
    assert _refusal(frame) in ("", "protocol", "protocol_version", "unknown_type")


@given(st.integers(0, 2**63), st.sampled_from(EXAMPLES), st.data())
def test_a_flipped_byte_is_a_message_or_a_protocol_error(seed: int, example: m.Message, draw: st.DataObject) -> None:
    frame = bytearray(_encode(example))
    frame[draw.draw(st.integers(0, len(frame) - 1))] ^= 1 + seed % 255
    assert _refusal(bytes(frame)) in ("", "protocol", "protocol_version", "unknown_type")


def test_an_error_reply_becomes_an_error_with_the_peer_and_its_code() -> None:
    fenced = envelope.problem_of(envelope.error_reply(Fenced("a newer process")), "broker")
    assert (type(fenced), fenced.text) == (Fenced, "broker: a newer process")
    busy = envelope.problem_of(m.Error(code="busy", text="later", retryable=True), "broker")
    assert (type(busy), busy.code, busy.retryable) == (SlimebusError, "busy", True)


def test_the_document_has_the_keys_that_are_always_there_in_bold() -> None:
    text = PROTOCOL.read_text().partition("## Joining")[2]
    inner = {"lease_reply": [m.LeasedGroup], "read_reply": [m.ReadGroup]}
    for name, cls in m.TYPES.items():
        section = text.split(f"### `{name}`", 1)[1].split("\n### ", 1)[0]
        needed = {field.name for kind in (cls, *inner.get(name, ())) for field in msgspec.structs.fields(kind) if field.required}
        assert set(re.findall(r"\*\*`(\w+)`\*\*", section)) == needed, name


@pytest.mark.parametrize(("changed", "where"), [({"epoch": "x"}, "header.epoch"), ({"body": {"lineage": 1}}, "body.lineage")])
def test_a_value_of_a_wrong_type_is_named_by_where_it_stands(changed: dict[str, object], where: str) -> None:
    header = {"v": 1, "type": "heartbeat", "id": 1, "run": "r", "sender": "w", "epoch": 1, "body": {}} | changed
    with pytest.raises(ProtocolError, match=f"at `{where}`"):
        envelope.decode([msgspec.msgpack.encode(header)])


def test_numbers_that_begin_at_a_time_of_day_in_milliseconds_can_be_sent() -> None:
    late = 10_000_000_000_000  # the year 2286
    for message in (m.Keys(have=late), m.KeysReply(generation=late), m.Welcome(run="r", epoch=late, heartbeat_s=1.0)):
        assert envelope.decode([envelope.encode(message, id=1, sender="w", epoch=late)]).message == message

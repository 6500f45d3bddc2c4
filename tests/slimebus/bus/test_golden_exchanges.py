"""Whole messages, bulk frames and all, byte by byte; docs/protocol-bytes.md shows them and every header in a form that can be read.

SLIMEBUS_WRITE_GOLDEN=1 writes the golden files and the page anew.
"""

import json
import os
import struct
import textwrap
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from message_examples import EXAMPLES

from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.samples import Sample, decode_group, encode_group

GOLDEN = Path(__file__).parent / "golden"
PAGE = Path(__file__).parents[3] / "docs" / "protocol-bytes.md"
FRAMES = GOLDEN / "frames"
FIRST = GOLDEN / "first"
IS_WRITING = bool(os.environ.get("SLIMEBUS_WRITE_GOLDEN"))

TOKENS, MASK, LOGPROBS = [5, 6, 7, 8], [0, 1, 1, 1], [0.0, -0.5, -0.25, -1.0]
COLUMNS = [struct.pack("<4i", *TOKENS), bytes(MASK), struct.pack("<4f", *LOGPROBS)]
"""The three fields of one sample of four tokens, written without the code under test."""


def _example(name: str) -> m.Message:
    (found,) = [example for example in EXAMPLES if m.wire_name(type(example)) == name]
    return found


def _header(message: m.Message) -> bytes:
    return envelope.encode(message, id=7, run="demo", sender="w1", epoch=3)


VERSIONS = [[m.NO_VERSION, 1], [6, 2], [7, 1]]
TABLE = msgpack.packb(
    {
        "num_tokens": [4],
        "versions": [VERSIONS],
        "fields": [
            {"name": "tokens", "dtype": "int32"},
            {"name": "loss_mask", "dtype": "uint8"},
            {"name": "rollout_logprobs", "dtype": "float32"},
        ],
        "reward": [0.5],
        "metadata": [{"level": 2}],
    }
)
"""Of one sample of four tokens, written without the code under test."""
PROMPT = msgpack.packb({"prompt": "2+3", "label": "5", "metadata": {}})
LATE = msgpack.packb([{"name": "teacher_logprobs", "dtype": "float32"}])
PARTIAL = m.GiveBack(group="0/42", lease=9, outcome="partial", reason="draining", lineage="a1")
LEASED = m.LeasedGroup(group="0/42", lease=11, num_samples=1, deadline_s=60.0, partial_frames=4)
MESSAGES: dict[str, tuple[str, list[bytes]]] = {
    "put": (
        "the table of one sample of four tokens, then its fields tokens, loss_mask and rollout_logprobs",
        [_header(_example("put")), TABLE, *COLUMNS],
    ),
    "lease_reply": (
        "the prompt record of the one group, then its partial: the table and the three fields of a worker that left",
        [_header(m.LeaseReply(groups=[LEASED])), PROMPT, TABLE, *COLUMNS],
    ),
    "give_back": ("a partial: table and fields as in a put", [_header(PARTIAL), TABLE, *COLUMNS]),
    "fetch_reply": ("the table of the one group, then its fields", [_header(m.FetchReply(num_frames=[4])), TABLE, *COLUMNS]),
    "put_fields": (
        "the list of fields, then one late field of one sample",
        [_header(_example("put_fields")), LATE, struct.pack("<4f", -0.1, -0.2, -0.3, -0.4)],
    ),
    "status_reply": ("the status", [_header(m.StatusReply()), b'{"run":"demo","state":"running","step":41}']),
}
"""What is sent, as frames: (what the bulk frames are, frames)."""


@pytest.mark.parametrize("name", MESSAGES)
def test_the_frames_of_a_whole_message_never_change(name: str) -> None:
    file = FRAMES / f"{name}.hex"
    frames = MESSAGES[name][1]
    if IS_WRITING:
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(frame.hex() + "\n" for frame in frames))
    golden = [bytes.fromhex(line) for line in file.read_text().splitlines()]
    assert golden == frames
    assert m.wire_name(type(envelope.decode(golden).message)) == name


def test_the_fields_of_a_put_are_the_bytes_that_samples_are_encoded_to() -> None:
    sample = Sample(
        tokens=np.array(TOKENS, np.int32),
        loss_mask=np.array(MASK, np.uint8),
        rollout_logprobs=np.array(LOGPROBS, np.float32),
        versions=[(version, length) for version, length in VERSIONS],
        reward=0.5,
        metadata={"level": 2},
    )
    assert encode_group([sample]) == [TABLE, *COLUMNS]
    (back,) = decode_group(MESSAGES["put"][1][1:])
    assert back.tokens.tolist() == TOKENS


@pytest.mark.parametrize("file", sorted(FIRST.glob("*.msgpack")), ids=lambda f: f.stem)
def test_what_the_first_release_sent_is_still_understood(file: Path) -> None:
    said = msgpack.unpackb(file.read_bytes())
    got = envelope.decode([file.read_bytes()])
    assert (got.header.type, got.header.id, got.header.run, got.header.sender) == (said["type"], said["id"], said["run"], said["sender"])
    for field, value in said["body"].items():
        now = msgspec.json.decode(msgspec.json.encode(getattr(got.message, field)))
        assert now == value, field


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: m.wire_name(type(e)))
def test_a_field_of_a_newer_release_is_ignored_in_every_message(example: m.Message) -> None:
    header = msgpack.unpackb(_header(example))
    newer = msgpack.packb(header | {"colour": "blue", "body": header["body"] | {"future_field": [1, {"deep": None}]}})
    assert envelope.decode([newer]).message == example


# --- the page ---


def _wrapped(data: bytes) -> str:
    text = data.hex()
    return "\n".join(text[i : i + 96] for i in range(0, len(text), 96)) or "(empty)"


def _readable(header: bytes) -> str:
    """As JSON, in lines of at most 150 characters, broken between two keys."""
    found: dict[str, Any] = msgpack.unpackb(header)
    text = json.dumps(found, ensure_ascii=False).replace(', "', ',\0"').replace(" ", "\1").replace("\0", " ")
    return textwrap.fill(text, 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False).replace("\1", " ")


def page() -> str:
    """The document."""
    lines = [
        "# The bytes of every message",
        "",
        "Made from the golden files of `tests/slimebus/bus/golden/`; a test compares them. Fields: [protocol.md](protocol.md).",
        "",
        "## Headers",
        "",
        "Frame 0 of one message of each type, as a map and as its bytes. Fields that have their default are left out.",
        "",
    ]
    for example in EXAMPLES:
        name = m.wire_name(type(example))
        frame = (GOLDEN / f"{name}.msgpack").read_bytes()
        lines += [f"### `{name}`", "", "```json", _readable(frame), "```", "```", _wrapped(frame), "```", ""]
    lines += ["## Whole messages", "", "Every frame, from the header on.", ""]
    for name, (what, frames) in MESSAGES.items():
        lines += [f"### `{name}` with its bulk frames", "", f"Bulk: {what}.", ""]
        for i, frame in enumerate(frames):
            lines += [f"Frame {i}, {len(frame)} bytes:", "", "```", _wrapped(frame), "```", ""]
    return "\n".join(lines)


def test_the_page_of_bytes_is_up_to_date() -> None:
    if IS_WRITING:
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run the tests of this file with SLIMEBUS_WRITE_GOLDEN=1"

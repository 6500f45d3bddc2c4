"""The quick check of a line of prompts refuses what its record would be refused for, and nothing else."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_record import LineReader, PromptKeys

READERS = [
    LineReader(PromptKeys()),
    LineReader(PromptKeys(prompt="q", label="answer", metadata="more")),
    LineReader(PromptKeys(prompt="prompt", label="prompt")),
    LineReader(PromptKeys(tools="tools")),
]


def outcome(read: Any, line: bytes) -> str:
    """Why a line is refused; empty when it is not."""
    try:
        read(line)
    except DataError as bad:
        return bad.text
    return ""


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: str(reader.keys))
@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b"{",
        b'{"prompt": ""}',
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "a", "q": "b", "x": {"prompt": 1, "prompt": 2}}',
        b'{"prompt": "a", "label": 18446744073709551615, "q": "b"}',
        b'{"prompt": "a", "label": 18446744073709551616, "q": "b"}',
        b'{"prompt": "a", "label": -9223372036854775809, "q": "b"}',
        b'{"prompt": "a", "metadata": {"n": 1e400}, "q": "b", "more": {"n": 1e400}}',
        b'{"prompt": "a", "metadata": 3, "q": "b", "more": []}',
        b'{"prompt": "a", "metadata": null, "label": null, "q": "b"}',
        b'{"prompt": "a", "metadata": {"n": {"m": [1]}}, "q": "b"}',
        b'{"prompt": [{"role": "user", "content": "a"}], "q": [{"content": "a"}]}',
        b'{"prompt": "\\ud800", "q": "\\ud800"}',
        b'{"prompt": "\xff", "q": "\xff"}',
        b'{"prompt": "a", "q": "b", "tools": 3}',
        b'{"prompt": "a", "q": "b", "x": NaN}',
    ],
)
def test_a_line_is_checked_as_its_record_is_made(reader: LineReader, line: bytes) -> None:
    assert outcome(reader.check, line) == outcome(reader.record, line)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda v: st.lists(v) | st.dictionaries(st.text(), v),
)


@given(st.dictionaries(st.sampled_from(["prompt", "label", "metadata", "tools", "x"]), VALUES), st.sampled_from(READERS))
def test_any_line_is_checked_as_its_record_is_made(fields: dict[str, Any], reader: LineReader) -> None:
    line = json.dumps(fields).encode()
    assert outcome(reader.check, line) == outcome(reader.record, line)

"""Lines that people really have in their files."""

import gzip
import json
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.source import FileRows
from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_record import MAX_RECORD_BYTES, PromptKeys


def _write(folder: Path, content: bytes, name: str = "p.jsonl") -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


def _records(rows: FileRows) -> list[dict[str, Any]]:
    return [msgspec.msgpack.decode(rows.record(row)) for row in range(len(rows))]


def _prompts(rows: FileRows) -> list[Any]:
    return [record["prompt"] for record in _records(rows)]


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "a"}\n{"prompt": "b"}',
        b'{"prompt": "a"}\r\n{"prompt": "b"}\r\n',
        b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n',
        b'\n{"prompt": "a"}\n   \n\t\n{"prompt": "b"}\n\n',
    ],
    ids=["no trailing newline", "CRLF", "byte order mark", "blank lines"],
)
def test_harmless_differences_are_read(tmp_path: Path, content: bytes) -> None:
    assert _prompts(FileRows([_write(tmp_path, content)])) == ["a", "b"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{oops", "not JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'{"question": "x"}', "no 'prompt' .*it has 'question'"),
        (b'{"prompt": null}', "must be text or a list of chat messages, got null"),
        (b'{"prompt": ""}', "got empty text"),
        (b'{"prompt": 3}', "must be text or a list of chat messages"),
        (b'{"prompt": "\\ud800"', "not JSON"),
        (b'{"prompt": []}', "got an empty list"),
        (b'{"prompt": ["hi"]}', "message 1 must be an object with a 'role', got text"),
        (b'{"prompt": [{"content": "hi"}]}', "message 1 must be an object with a 'role'"),
        (b'{"prompt": "x", "metadata": [1]}', "'metadata' must be an object, got list"),
        (b'{"prompt": "x", "label": NaN}', "NaN is not a JSON number; write null"),
        (b'{"prompt": "x", "prompt": "y"}', "the key 'prompt' stands twice"),
        (b'{"prompt": "x", "label": 1, "label": 2}', "the key 'label' stands twice"),
        (b'{"prompt": "x", "other": "\xff"}', "not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b'{"prompt": "x"} {"prompt": "y"}', "not JSON: Extra data"),
        (b'{"prompt": "x", "label": 123456789012345678901234567890}', "cannot be kept"),
        (b'{"prompt": "' + b"x" * MAX_RECORD_BYTES + b'"}', "a line of more than 16777216 bytes"),
        (b'{"prompt": "x", "tools": {"a": 1}}', "'tools' must be a list of tool objects"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not JSON"),
    ],
    ids=range(20),
)
def test_a_malformed_line_is_named_and_the_rest_can_be_used_without_it(tmp_path: Path, line: bytes, reason: str) -> None:
    path = _write(tmp_path, b'{"prompt": "fine"}\n\n' + line + b'\n{"prompt": "too"}\n')
    keys = PromptKeys(tools="tools")
    with pytest.raises(DataError, match=rf"p\.jsonl:3: .*{reason}"):
        FileRows([path], keys=keys)
    rows = FileRows([path], keys=keys, skip_bad=True)
    assert _prompts(rows) == ["fine", "too"]
    assert rows.num_skipped == 1
    assert f"{path}:3: " in rows.skipped[0]


def test_another_encoding_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path, '{"prompt": "a"}\n'.encode("utf-16"))
    with pytest.raises(DataError, match="UTF-16; save it as UTF-8"):
        FileRows([path])


def test_skipped_lines_are_listed_up_to_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    rows = FileRows([_write(tmp_path, b'{"prompt": "a"}\n' + b"{\n" * 150)], skip_bad=True)
    assert (rows.num_skipped, len(rows.skipped), len(rows)) == (150, 100, 1)


def test_when_every_line_is_malformed_there_are_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompts in .*p\.jsonl \(2 were skipped as malformed\)"):
        FileRows([_write(tmp_path, b"{\n{\n")], skip_bad=True)


def test_chat_messages_with_tool_calls_travel_as_they_are(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "1+1? ünï"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    path = _write(tmp_path, json.dumps({"q": messages, "a": {"x": [1.5]}, "functions": tools, "meta": {"n": 1}}).encode())
    rows = FileRows([path], keys=PromptKeys(prompt="q", label="a", metadata="meta", tools="functions"))
    assert _records(rows) == [{"prompt": messages, "label": {"x": [1.5]}, "metadata": {"n": 1, "tools": tools}}]


def test_one_key_may_serve_as_prompt_and_label(tmp_path: Path) -> None:
    rows = FileRows([_write(tmp_path, b'{"text": "a"}\n')], keys=PromptKeys(prompt="text", label="text"))
    assert _records(rows) == [{"prompt": "a", "label": "a", "metadata": {}}]


def test_a_gzip_file_is_read(tmp_path: Path) -> None:
    packed = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(1000)))
    path = _write(tmp_path, packed, "p.jsonl.gz")
    assert _prompts(FileRows([f"{path}@[998:]"], spill_dir=tmp_path / "new")) == ["998", "999"]
    assert not list((tmp_path / "new").iterdir()), "the copy has no name and ends with the process"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 100, mtime=0)[:-9], "cannot be unpacked"),
        ("not.jsonl.gz", b"plain text", "cannot be unpacked"),
        ("p.jsonl.zst", b"", "unpack it first"),
    ],
)
def test_a_packed_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    with pytest.raises(DataError, match=rf"{name}.*{reason}"):
        FileRows([_write(tmp_path, content, name)])


def test_a_file_that_changes_while_it_is_used_is_noticed_and_may_be_put_back(tmp_path: Path) -> None:
    content = b'{"prompt": "aaaa"}\n{"prompt": "b"}\n'
    path = _write(tmp_path, content)
    rows = FileRows([path])
    os.utime(path, (1, 1))
    assert msgspec.msgpack.decode(rows.record(1))["prompt"] == "b", "touched, not changed"
    for other in (content[:25], b'{"prompt": "xxxx"}\n{"prompt": "b"}\n', b""):
        _write(tmp_path, other)
        with pytest.raises(DataError, match=r"p\.jsonl changed while the run goes on; put back"):
            rows.record(1)
    _write(tmp_path, content)
    os.utime(path, (2, 2))
    assert msgspec.msgpack.decode(rows.record(0))["prompt"] == "aaaa"
    _write(tmp_path, content + b'{"prompt": "one more"}\n')
    assert msgspec.msgpack.decode(rows.record(0))["prompt"] == "aaaa", "what was appended does not matter"


def test_a_file_that_is_replaced_is_read_to_its_end(tmp_path: Path) -> None:
    path = _write(tmp_path, b'{"prompt": "old"}\n')
    rows = FileRows([path])
    os.replace(_write(tmp_path, b"{", "new"), path)
    assert _prompts(rows) == ["old"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("none.jsonl", "does not exist"),
        (".", "is a directory; name the files in it"),
        ("p.jsonl@[5:]", r"the slice @\[5:\] takes none of its 2 rows"),
        ("p.jsonl@[1:2:3]", "expected PATH, PATH@"),
        ("p.jsonl*0", "the weight must be above 0"),
        ("empty.jsonl", "no prompts in .*empty.jsonl"),
    ],
)
def test_entries_that_name_nothing_are_refused(tmp_path: Path, spec: str, reason: str) -> None:
    _write(tmp_path, b'{"prompt": "a"}\n{"prompt": "b"}\n')
    _write(tmp_path, b"", "empty.jsonl")
    with pytest.raises(DataError, match=reason):
        FileRows([str(tmp_path / spec)])


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied")

    path = _write(tmp_path, b'{"prompt": "a"}\n')
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"p\.jsonl cannot be read: Permission denied"):
        FileRows([path])


def test_a_file_may_have_a_name_like_an_entry(tmp_path: Path) -> None:
    assert _prompts(FileRows([_write(tmp_path, b'{"prompt": "a"}\n', "p@[0:1]*2")])) == ["a"]

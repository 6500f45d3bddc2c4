"""Parquet files: the same promises as jsonl."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.source import FileRows, FileSource
from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_record import PromptKeys

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def _write(folder: Path, columns: dict[str, Any], rows_a_group: int = 1000, name: str = "p.parquet") -> str:
    pq.write_table(pa.table(columns), folder / name, row_group_size=rows_a_group)
    return str(folder / name)


def _record(rows: FileRows, row: int) -> dict[str, Any]:
    return msgspec.msgpack.decode(rows.record(row))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows_a_group", [1, 7, 64, 100, 1000])
def test_any_row_is_read_at_random_whatever_the_row_groups(tmp_path: Path, rows_a_group: int) -> None:
    columns = {"prompt": [f"p{i}" for i in range(300)], "label": list(range(300)), "metadata": [{"i": i} for i in range(300)]}
    rows = FileRows([_write(tmp_path, columns, rows_a_group)], spill_dir=tmp_path)
    assert len(rows) == 300
    for row in (299, 0, 63, 64, 65, 128, 7):
        assert _record(rows, row) == {"prompt": f"p{row}", "label": row, "metadata": {"i": row}}


def test_slices_weights_and_mixing_with_jsonl_work_as_for_lines(tmp_path: Path) -> None:
    path = _write(tmp_path, {"prompt": [f"p{i}" for i in range(10)]})
    (tmp_path / "q.jsonl").write_text('{"prompt": "q"}\n')
    source = FileSource(FileRows([f"{path}@[-3:]*3", f"{tmp_path / 'q.jsonl'}*1"]), shuffle=False, num_epochs=1)
    found = [source.take(position) for position in range(5)]
    assert sorted(msgspec.msgpack.decode(p.record)["prompt"] for p in found if p) == ["p7", "p8", "p9", "q"]


def test_chat_messages_lose_only_the_keys_that_parquet_added(tmp_path: Path) -> None:
    call = {"function": {"name": "add", "arguments": "{}"}}
    prompts = [
        [{"role": "user", "content": "hi", "tool_calls": None}],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
    ]
    tools = [[{"name": "add"}], None]
    rows = FileRows([_write(tmp_path, {"prompt": prompts, "tools": tools})], keys=PromptKeys(tools="tools"))
    assert _record(rows, 0) == {"prompt": [{"role": "user", "content": "hi"}], "label": None, "metadata": {"tools": [{"name": "add"}]}}
    assert _record(rows, 1)["prompt"][1] == {"role": "assistant", "content": None, "tool_calls": [call]}


def test_dictionary_and_map_columns_are_read(tmp_path: Path) -> None:
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    metadata = pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64()))
    rows = FileRows([_write(tmp_path, {"prompt": words, "metadata": metadata})])
    assert [_record(rows, row)["metadata"] for row in range(3)] == [{"k": 1}, {}, {}]
    assert [_record(rows, row)["prompt"] for row in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"question": ["a"]}, r"p\.parquet: no column 'prompt' \(input_key\); it has 'question'"),
        ({"prompt": [1]}, "column 'prompt' is int64; expected text"),
        ({"prompt": [["a"]]}, "column 'prompt' is list<.*expected text, or a list of structs with a 'role'"),
        ({"prompt": [[{"content": "a"}]]}, "a list of structs with a 'role'"),
        ({"prompt": [b"a"]}, "column 'prompt' is binary"),
        ({"prompt": ["a"], "metadata": ["{}"]}, "column 'metadata' is string; expected a struct"),
    ],
)
def test_columns_of_another_type_are_refused(tmp_path: Path, columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        FileRows([_write(tmp_path, columns)])


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(None, "got null"), ("", "got empty text")],
)
def test_a_row_that_is_no_prompt_is_named_or_skipped(tmp_path: Path, bad: Any, reason: str) -> None:
    path = _write(tmp_path, {"prompt": ["p"] * 200 + [bad] + ["q"]})
    with pytest.raises(DataError, match=rf"p\.parquet: row 201: .*{reason}"):
        FileRows([path])
    rows = FileRows([path], skip_bad=True)
    assert (len(rows), rows.num_skipped, _record(rows, 200)["prompt"]) == (201, 1, "q")


@pytest.mark.parametrize("bad", [None, [], [None], [{"role": None, "content": "x"}]])
def test_a_chat_without_roles_is_named(tmp_path: Path, bad: Any) -> None:
    fine = [{"role": "user", "content": "x"}]
    with pytest.raises(DataError, match=r"p\.parquet: row 101: "):
        FileRows([_write(tmp_path, {"prompt": [fine] * 100 + [bad]})])


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("no")
    with pytest.raises(DataError, match=r"p\.parquet cannot be read as parquet"):
        FileRows([str(tmp_path / "p.parquet")])


def test_an_empty_table_has_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no prompts"):
        FileRows([_write(tmp_path, {"prompt": pa.array([], pa.string())})])


def test_without_pyarrow_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path, {"prompt": ["a"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'slimebus\[parquet\]'"):
        FileRows([path])


def test_the_fingerprint_follows_the_file_and_the_slice(tmp_path: Path) -> None:
    path = _write(tmp_path, {"prompt": ["a", "b"]})
    before = FileRows([path]).fingerprint
    assert FileRows([path]).fingerprint == before
    assert FileRows([f"{path}@[:1]"]).fingerprint != before
    _write(tmp_path, {"prompt": ["a", "c"]})
    assert FileRows([path]).fingerprint != before

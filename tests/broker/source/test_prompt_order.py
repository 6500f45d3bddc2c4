"""Prompts from jsonl files."""

import json
from pathlib import Path

import msgspec
import pytest

from broker.source import FileRows, FileSource
from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_record import PromptKeys


def _file(folder: Path, count: int = 10, name: str = "p.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}", "label": i, "metadata": {"i": i}}) + "\n" for i in range(count)))
    return str(path)


def _prompts(source: FileSource, positions: range) -> list[str]:
    found = [source.take(position) for position in positions]
    return [msgspec.msgpack.decode(p.record)["prompt"] for p in found if p is not None]


def test_records_carry_prompt_label_and_metadata(tmp_path: Path) -> None:
    rows = FileRows([_file(tmp_path)])
    assert msgspec.msgpack.decode(rows.record(3)) == {"prompt": "p.jsonl 3", "label": 3, "metadata": {"i": 3}}


def test_keys_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": [{"role": "user", "content": "hi"}], "answer": "4"}\n')
    rows = FileRows([str(tmp_path / "q.jsonl")], keys=PromptKeys(prompt="question", label="answer"))
    assert msgspec.msgpack.decode(rows.record(0)) == {"prompt": [{"role": "user", "content": "hi"}], "label": "4", "metadata": {}}


@pytest.mark.parametrize(("bounds", "expected"), [("[2:4]", [2, 3]), ("[:2]", [0, 1]), ("[8:]", [8, 9]), ("[-1:]", [9])])
def test_a_slice_takes_rows_of_a_file(tmp_path: Path, bounds: str, expected: list[int]) -> None:
    source = FileSource(FileRows([f"{_file(tmp_path)}@{bounds}"]), shuffle=False, num_epochs=1)
    assert _prompts(source, range(10)) == [f"p.jsonl {i}" for i in expected]


def test_files_follow_each_other(tmp_path: Path) -> None:
    rows = FileRows([_file(tmp_path, 2, "a"), _file(tmp_path, 1, "b")])
    assert _prompts(FileSource(rows, shuffle=False, num_epochs=1), range(5)) == ["a 0", "a 1", "b 0"]


def test_each_epoch_shuffles_anew_and_holds_every_prompt_once(tmp_path: Path) -> None:
    rows = FileRows([_file(tmp_path, 50)])
    source = FileSource(rows, seed=3, num_epochs=2)
    first, second = _prompts(source, range(50)), _prompts(source, range(50, 100))
    assert sorted(first) == sorted(second) == sorted(f"p.jsonl {i}" for i in range(50))
    assert first != second
    assert source.take(100) is None
    assert _prompts(FileSource(rows, seed=3), range(20, 30)) == first[20:30], "any position can be resumed"
    assert _prompts(FileSource(rows, seed=4), range(50)) != first


def test_a_prompt_is_found_again_by_its_id(tmp_path: Path) -> None:
    source = FileSource(FileRows([_file(tmp_path)]), seed=3, num_epochs=2)
    prompt = source.take(13)
    assert prompt is not None
    assert source.find(prompt.id) == prompt
    assert [source.find(name) for name in ("0/10", "2/0", "x", "-1/0")] == [None] * 4


def test_the_fingerprint_follows_the_rows_and_their_order(tmp_path: Path) -> None:
    path = _file(tmp_path)
    before = FileSource(FileRows([path]), seed=1).fingerprint
    assert FileSource(FileRows([path]), seed=1).fingerprint == before
    assert FileSource(FileRows([path]), seed=2).fingerprint != before
    Path(path).write_text(Path(path).read_text().replace("3", "4"))
    assert FileSource(FileRows([path]), seed=1).fingerprint != before


def test_missing_and_empty_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        FileRows([str(tmp_path / "none.jsonl")])
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no prompts"):
        FileRows([str(tmp_path / "empty.jsonl")])


def test_weighted_files_take_turns_and_each_goes_round_in_its_own_epochs(tmp_path: Path) -> None:
    rows = FileRows([f"{_file(tmp_path, 4, 'a')}*2", f"{_file(tmp_path, 6, 'b')}*1"])
    source = FileSource(rows, seed=1, num_epochs=1)
    assert source.epoch_size == 18, "6 windows of 3 until b was gone through"
    found = [source.take(position) for position in range(19)]
    assert found[18] is None
    prompts = [p for p in found if p is not None]
    texts = [msgspec.msgpack.decode(p.record)["prompt"] for p in prompts]
    assert sorted(t for t in texts[:6] if t[0] == "a") == [f"a {i}" for i in range(4)], "a is through after two windows"
    assert sorted(t for t in texts if t[0] == "b") == [f"b {i}" for i in range(6)]
    assert [texts.count(f"a {i}") for i in range(4)] == [3] * 4
    assert len({p.id for p in prompts}) == 18
    assert [source.find(p.id) for p in prompts] == prompts


def test_a_weighted_file_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no prompts in .*b"):
        FileRows([f"{_file(tmp_path, 4, 'a')}*2", _file(tmp_path, 0, "b")])


def test_the_order_never_changes_between_releases(tmp_path: Path) -> None:
    found = _prompts(FileSource(FileRows([_file(tmp_path)]), seed=0), range(10))
    assert found == [f"p.jsonl {row}" for row in (6, 1, 0, 5, 3, 8, 7, 9, 2, 4)]

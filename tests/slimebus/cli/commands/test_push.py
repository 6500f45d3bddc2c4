"""The lines that are pushed, and what is said of the malformed ones."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import DataError, UsageError
from slimebus.cli.commands.push import SHOWN_LINES, _checked, push, records_of
from slimebus.config import resolve


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "p.jsonl"


def test_every_malformed_line_is_named(file: Path) -> None:
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\noops\n\n{"prompt": 3}\n{"prompt": "b"}')
    assert len(list(records_of(file, resolve(None), []))) == 2
    with pytest.raises(DataError) as caught:
        _checked(file, resolve(None))
    first, second = caught.value.text.splitlines()
    assert first.startswith(f"{file}:2: not JSON")
    assert second == f"  {file}:4: 'prompt' must be text or a list of chat messages, got a number"


def test_of_many_malformed_lines_the_first_are_named_and_the_others_counted(file: Path) -> None:
    file.write_bytes(b"oops\n" * 100)
    with pytest.raises(DataError) as caught:
        _checked(file, resolve(None))
    said = caught.value.text.splitlines()
    assert (len(said), said[-1]) == (SHOWN_LINES + 1, f"  {file}: 80 more malformed lines")


def test_skipped_lines_are_printed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"oops\n")
    _checked(file, resolve(None, {"data.skip_bad_prompts": True}))
    assert capsys.readouterr().err.startswith(f"skipped {file}:1: not JSON")


def test_a_pipe_is_refused_before_it_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = CliRunner().invoke(push, [str(tmp_path / "pipe"), "--broker", "tcp://127.0.0.1:9"])
    assert isinstance(done.exception, UsageError)
    assert "is no file that can be read twice" in done.exception.text

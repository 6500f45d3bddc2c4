"""The lines that are pushed, and what is said of the malformed ones."""

import io
import json

import pytest

from slimebus.bus.errors import DataError
from slimebus.cli.commands.push import SHOWN_LINES, Lines, _pieces
from slimebus.cli.config.schema import DataConfig


def test_every_malformed_line_is_named() -> None:
    lines = Lines("p.jsonl", DataConfig())
    assert len(list(lines.records([b'{"prompt": "a"}\n', b"oops\n", b"\n", b'{"prompt": 3}\n']))) == 1
    with pytest.raises(DataError) as caught:
        lines.check()
    first, second = caught.value.text.splitlines()
    assert first.startswith("p.jsonl:2: not JSON")
    assert second == "  p.jsonl:4: 'prompt' must be text or a list of chat messages, got a number"


def test_of_many_malformed_lines_the_first_are_named_and_the_others_counted() -> None:
    lines = Lines("p.jsonl", DataConfig())
    assert not list(lines.records([b"oops\n"] * 100))
    with pytest.raises(DataError) as caught:
        lines.check()
    said = caught.value.text.splitlines()
    assert (len(said), said[-1]) == (SHOWN_LINES + 1, "  p.jsonl: 80 more malformed lines")


def test_skipped_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines("p.jsonl", DataConfig(skip_bad_prompts=True))
    assert not list(lines.records([b"oops\n"]))
    lines.check()
    assert capsys.readouterr().err.startswith("skipped p.jsonl:1: not JSON")


def test_line_numbers_go_on_over_the_pieces_of_a_pipe() -> None:
    class Dripping(io.BytesIO):
        """Gives seven bytes at a time."""

        def read1(self, size: int | None = -1) -> bytes:
            return self.read(7)

    content = b"\xef\xbb\xbf" + b"".join(json.dumps({"prompt": f"p{i}"}).encode() + b"\n" for i in range(5)) + b"oops"
    lines = Lines("stdin", DataConfig())
    assert sum(len(list(lines.records(piece))) for piece in _pieces(Dripping(content))) == 5
    assert [problem.partition(" ")[0] for problem in lines.problems] == ["stdin:6:"]

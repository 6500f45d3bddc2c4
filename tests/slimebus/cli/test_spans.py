import json
import threading
from pathlib import Path
from typing import Any

import pytest

from slimebus.cli.spans import SCHEDSTAT, Spans


def rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_span_says_what_was_done_when_and_for_how_long(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "metrics", "worker-1")
    with spans("pull", version=3) as span:
        span.about["version"] = 4
    (row,) = rows(tmp_path / "metrics" / "spans-worker-1.jsonl")
    assert (row["process"], row["name"], row["version"]) == ("worker-1", "pull", 4)
    assert row["begin"] > 1.7e9
    assert row["seconds"] == pytest.approx(span.seconds, abs=1e-6)


def test_what_fails_is_recorded_and_goes_on_failing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Spans(tmp_path, "w")("pull"):
        raise KeyError("x")
    assert rows(tmp_path / "spans-w.jsonl")[0]["failed"] == "KeyError"


def test_cpu_seconds_are_those_of_the_thread(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "trainer", counts_cpu=True)
    with spans("wait"):
        threading.Event().wait(0.05)
    (row,) = rows(tmp_path / "spans-trainer.jsonl")
    assert row["seconds"] >= 0.05 > row["cpu_s"]
    if SCHEDSTAT.exists():
        assert 0 <= row["queued_s"] <= row["seconds"] - row["cpu_s"] + 0.01


def test_without_a_directory_it_only_measures() -> None:
    with Spans()("train") as span:
        threading.Event().wait(0.01)
    assert span.seconds >= 0.01


def test_a_process_keeps_its_last_spans_and_no_more_than_two_files(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "w", max_bytes=1000)
    for step in range(100):
        with spans("train", step=step):
            pass
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["spans-w.jsonl", "spans-w.old.jsonl"]
    assert all(file.stat().st_size < 1200 for file in files)
    steps = [row["step"] for file in reversed(files) for row in rows(file)]
    assert steps == list(range(steps[0], 100))


def test_spans_of_many_threads_are_whole_lines(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "w")

    def work(number: int) -> None:
        for _ in range(50):
            with spans("x", number=number):
                pass

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row["number"] for row in rows(tmp_path / "spans-w.jsonl")) == sorted(list(range(4)) * 50)

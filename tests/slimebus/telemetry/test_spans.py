import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from slimebus.telemetry.spans import SCHEDSTAT, Spans, collector_of, phases_of


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


def test_a_process_keeps_its_last_spans_and_no_more_than_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slimebus.telemetry.spans.MAX_BYTES", 1000)
    spans = Spans(tmp_path, "w")
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


def test_a_span_says_by_how_much_the_brokers_clock_is_ahead_as_its_quickest_answer_told(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "w")
    for offset in (None, (0.5, 3.0), (0.01, 2.0), (0.2, 9.0)):
        if offset is not None:
            spans.compare_clock(*offset)
        with spans("pull"):
            pass
    assert [row.get("offset") for row in rows(tmp_path / "spans-w.jsonl")] == [None, 3.0, 2.0, 2.0]
    for _ in range(8):
        spans.compare_clock(0.3, 5.0)
    with spans("pull"):
        pass
    assert rows(tmp_path / "spans-w.jsonl")[-1]["offset"] == 5.0, "a clock drifts: what was long ago counts no more"


def test_an_offset_that_the_way_of_the_answer_explains_is_none(tmp_path: Path) -> None:
    spans = Spans(tmp_path, "w")
    for took_s, offset_s in ((0.3, -0.15), (0.2, -0.101)):
        spans.compare_clock(took_s, offset_s)
        with spans("pull"):
            pass
    assert [row["offset"] for row in rows(tmp_path / "spans-w.jsonl")] == [0.0, -0.101]


def test_phases_of_a_group_end_in_its_training_which_ends_before_the_commit() -> None:
    life = [("queued", 0.0), ("leased", 1.0), ("queued", 2.0), ("leased", 3.0), ("ready", 5.0), ("assigned", 8.0), ("committed", 12.0)]
    assert list(phases_of(life, train_s=2.0, after_s=0.5)) == [
        *(("queue", 0.0, 1.0), ("lease", 1.0, 2.0), ("queue", 2.0, 3.0), ("lease", 3.0, 5.0), ("ready", 5.0, 8.0)),
        *(("assigned", 8.0, 9.5), ("trained", 9.5, 11.5)),
    ]
    rewound = [("assigned", 1.0), ("ready", 2.0)]
    assert list(phases_of(rewound, train_s=9.0, after_s=0.0)) == [("assigned", 1.0, 2.0)]


def test_without_its_packages_no_span_goes_to_opentelemetry_which_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert collector_of("r", "w") is None
    assert not caplog.records
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with Spans(tmp_path, "w")("pull"):
        pass
    assert "pip install 'slimebus[otel]'" in caplog.text
    assert len(rows(tmp_path / "spans-w.jsonl")) == 1


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_an_offset_that_is_not_finite_is_ignored(tmp_path: Path, odd: float) -> None:
    spans = Spans(tmp_path, "w")
    spans.compare_clock(0.5, 3.0)
    spans.compare_clock(0.01, odd)
    spans.compare_clock(odd, 4.0)
    with spans("pull"):
        pass
    assert rows(tmp_path / "spans-w.jsonl")[0]["offset"] == 3.0

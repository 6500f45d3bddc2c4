import json
import logging
import math
import re
import sys
from pathlib import Path

import pytest
from small_disk import fill, small_disk

from slimebus.bus.errors import UsageError
from slimebus.telemetry import metrics
from slimebus.telemetry.metrics import BusyMeter, JsonLines, MetricsWriter
from slimebus.view.report import rows_of


def numbers(file: Path) -> list[int]:
    return [json.loads(line)["n"] for line in file.read_text().splitlines()]


def test_rows_wait_in_memory_while_they_cannot_be_written_which_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").mkdir()
    for n in range(3):
        lines.add({"n": n})
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    (tmp_path / "rows.jsonl").rmdir()
    lines.add({"n": 3})
    assert numbers(tmp_path / "rows.jsonl") == [0, 1, 2, 3]


def test_of_too_many_waiting_rows_the_oldest_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(metrics, "MAX_WAITING", 2)
    lines = JsonLines(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").mkdir()
    for n in range(5):
        lines.add({"n": n})
    assert lines.num_dropped == 3
    (tmp_path / "rows.jsonl").rmdir()
    lines.flush()
    assert numbers(tmp_path / "rows.jsonl") == [3, 4]
    assert "3 rows were dropped" in caplog.text


def test_without_a_path_nothing_is_written() -> None:
    JsonLines(None).add({"n": 1})


def test_metrics_are_json_lines_and_tensorboard_events(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "trainer", tensorboard=True)
    writer.write(3, {"loss": 0.5, "note": "text", "kl": math.inf, "mean": math.nan})
    writer.close()
    (row,) = rows_of((tmp_path / "trainer.jsonl").read_bytes())
    assert (row["step"], row["loss"], row["note"], len(row)) == (3, 0.5, "text", 4)
    assert events_of(tmp_path) == {3: ["train/loss"]}


def events_of(folder: Path) -> dict[int, list[str]]:
    """The tags of each step, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (file,) = (folder / "tensorboard" / "trainer").iterdir()
    header, *events = EventFileLoader(str(file)).Load()
    assert header.file_version == "brain.Event:2"
    return {event.step: [value.tag for value in event.summary.value] for event in events}


def test_a_full_disk_delays_tensorboard_events_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        hog = fill(disk)
        writer = MetricsWriter(disk, "trainer", tensorboard=True)
        writer.write(1, {"loss": 0.5})
        assert re.search(r"rows cannot be written to .*events.out.* and wait in memory: .*No space left", caplog.text)
        hog.unlink()
        writer.write(2, {"loss": 0.5})
        writer.close()
        assert events_of(disk) == {1: ["train/loss"], 2: ["train/loss"]}


def test_names_are_grouped_by_what_they_tell_of() -> None:
    named = {("trainer", "loss"): "train/loss", ("critic", "value_loss"): "train/value_loss", ("trainer", "lag/all/m2"): "train/lag/all/m2"}
    named |= {
        ("trainer", "weights_copy_s"): "weights/copy_s",
        ("rollout", "sync_s"): "weights/sync_s",
        ("rollout", "tokens"): "rollout/tokens",
    }
    assert {key: metrics.grouped(*key) for key in named} == named


def test_without_the_package_of_wandb_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="pip install 'slimebus"):
        MetricsWriter(tmp_path, "trainer", wandb={"name": "r"})


def test_overlapping_work_is_busy_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("slimebus.telemetry.metrics.time.monotonic", lambda: now[0])
    meter = BusyMeter()
    for moment, act in ((10, meter.enter), (11, meter.enter), (12, meter.leave), (14, meter.leave), (16, meter.enter)):
        now[0] = float(moment)
        act()
    now[0] = 17.0
    assert (meter.busy_s, meter.since_s) == (5.0, 7.0)

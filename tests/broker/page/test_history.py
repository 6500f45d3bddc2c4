"""What the page reads of a run's records: growing files, steps trained again, a hundred thousand steps on few points."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.json import encode

from broker.page.history import MAX_POINTS, VERSIONS_SHOWN, History


def step(number: int, at: float = 0.0, **metrics: float) -> dict[str, Any]:
    row = {"time": at or 100.0 + number, "step": number, "version": number, "tokens": 50, "lag_max": number % 3, "ready": 1}
    row |= {"rollout_tokens": 80.0 * number, "leased": 2, "queued": 3, "lag_mean": 0.5, "wasted_tokens": 0}
    return row | {"metrics": {"reward": float(number), **metrics}}


@pytest.fixture
def history(tmp_path: Path) -> History:
    (tmp_path / "metrics").mkdir()
    return History(tmp_path)


def write(history: History, *rows: dict[str, Any], file: str = "broker", end: str = "\n") -> None:
    with (history.folder / f"{file}.jsonl").open("a") as out:
        out.write("".join(json.dumps(row) + "\n" for row in rows[:-1]) + json.dumps(rows[-1]) + end)


def read(history: History) -> dict[str, Any]:
    while history.read():
        pass
    return history.chart_columns()


def test_steps_are_read_as_they_come_and_half_a_line_waits(history: History) -> None:
    assert read(history) == {"step": []}
    write(history, step(0), step(1), end="")
    assert read(history)["step"] == [0.0]
    write(history, {}, end="\n")  # the line is no JSON now: it is left out
    write(history, step(2))
    found = read(history)
    assert found["step"] == [0.0, 2.0]
    assert found["steps_per_s"] == [None, 1.0]
    assert found["tokens_per_s"] == [None, 25.0]
    assert found["rollout_tokens_per_s"] == [None, 80.0]


def test_a_change_of_settings_keeps_the_charts(history: History) -> None:
    write(history, step(0), step(1), {"settings": {"max_staleness": 2}, "from_step": 2}, step(2))
    assert read(history)["step"] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "row",
    [
        {"step": 0, "metrics": {"weights_version": None}},
        {"step": 0, "metrics": None},
        {"step": "a"},
        {"step": None},
        {"evaluation": "x", "mean_reward": 1},
    ],
)
def test_a_row_that_is_none_of_ours_is_left_out_with_a_warning(history: History, row: Any, caplog: pytest.LogCaptureFixture) -> None:
    write(history, row, step(1))
    assert read(history)["step"][-1] == 1.0
    assert history.charts()["reward"][-1] == 1.0
    assert "that is none of ours" in caplog.text


STATUS = {"settings": {"max_staleness": 1}, "lag": {"histogram": {"0": 1}}, "pace": {"workers": 1}}


@pytest.mark.parametrize("value", ["x", None, [1], {"a": 1}, 1e308, 10**400, True], ids=lambda value: repr(value)[:8])
def test_no_value_of_a_row_ends_the_page(history: History, value: Any) -> None:
    served = {"step": 1, "time": 1.0, "serving_s": 1.0, "busy_s": 1.0, "sync_s": 0.1, "sync_wire_s": 0.1}
    for name in ("time", "serving_s", "busy_s", "sync_s", "sync_wire_s"):
        write(history, *[served | {name: value}] * 20, file=f"rollout-{name}")
    names = ("time", "version", "lag_max", "wasted_tokens")
    write(history, *(step(i) | {name: value} for i, name in enumerate(names)), step(9, **{"lag/0/tokens": value}))
    write(history, {"evaluation": "k", "dataset": "d", "version": 1, "step": 3, "mean_reward": value})
    read(history)
    history.add_pulls([{"name": "far", "version": 9, "metrics": {"sync_s": value}}])
    assert read(history)["step"][-1] == 9.0
    assert {len(column) for column in history.columns.values()} == {len(history.columns["step"])}
    encode(history.charts() | history.remarks(STATUS))


def test_warnings_that_cannot_be_read_are_left_out(history: History) -> None:
    logs = history.folder.parent / "logs"
    (logs / "warnings-folder.jsonl").mkdir(parents=True)
    (logs / "warnings-gone.jsonl").symlink_to(logs / "nowhere")
    (logs / "warnings-w1.jsonl").write_text('{"time":"x","text":"a"}\n{"time":null}\n{"time":2.0,"text":"b"}\n{"time":3.0,"text":"c"}\n')
    assert [row["text"] for row in history.warnings() if "text" in row] == ["c", "b", "a"]


def test_steps_that_are_trained_again_replace_those_of_before(history: History) -> None:
    write(history, *(step(i, reward=1.0) for i in range(5)), *(step(i, at=200.0 + i, reward=2.0) for i in range(3, 6)))
    found = read(history)
    assert found["step"] == [0, 1, 2, 3, 4, 5]
    assert found["reward"] == [1, 1, 1, 2, 2, 2]


def test_lags_that_come_later_are_zero_before(history: History) -> None:
    write(history, step(0, **{"lag/0/tokens": 5.0, "lag/all/tokens": 5.0}), step(1, **{"lag/2/tokens": 7.0}), step(2))
    assert read(history)["lags"] == {"0": [5, 0, 0], "2": [0, 7, 0]}


def test_a_file_that_became_shorter_is_read_from_its_beginning(history: History) -> None:
    write(history, step(0), step(1), step(2))
    read(history)
    (history.folder / "broker.jsonl").write_text(json.dumps(step(0, reward=9.0)) + "\n")
    assert read(history)["reward"] == [9.0]


def test_a_hundred_thousand_steps_are_thinned_to_means(history: History) -> None:
    for number in range(100_000):
        history._add_step(step(number))
    began = time.perf_counter()
    found = history.chart_columns()
    assert time.perf_counter() - began < 1.0
    assert MAX_POINTS / 2 < len(found["step"]) <= MAX_POINTS
    assert found["step"][-1] == 99_999
    assert found["reward"][0] == np.mean(range(256))
    assert found["steps_per_s"][5] == pytest.approx(1.0)
    assert found["tokens_per_s"][5] == pytest.approx(50.0)
    assert set(found["lag_max"][:-1]) == {2.0}
    assert len(json.dumps(found)) < 200_000


def test_workers_idle_share_starts_where_they_are_warm_and_a_restarted_one_begins_anew(history: History) -> None:
    rows = [{"step": i, "serving_s": 10.0 * i, "busy_s": 10.0 * i - (5.0 * (i - 5) if i > 5 else 0.0)} for i in range(20)]
    write(history, *rows, file="rollout-w1")
    write(history, *(step(i, wait_s=9.0 if i < 5 else 1.0, train_s=1.0, publish_s=0.0, save_s=0.0) for i in range(10)))
    read(history)
    status = {"settings": {"max_staleness": 1}, "lag": {"histogram": {"0": 1}}, "pace": {"workers": 1}}
    assert history.advice(status)[0].startswith("The trainer waited 50% of the time and workers were idle for 50% of theirs")
    write(history, {"step": 21, "serving_s": 1.0, "busy_s": 1.0}, file="rollout-w1")
    read(history)
    assert "not on record here" in history.advice(status)[0]
    write(history, step(10, wait_s=60.0, train_s=1.0, publish_s=0.0, save_s=0.0))
    read(history)
    assert "most of it for one batch" in history.advice(status)[0]


def test_versions_have_the_stages_of_publishing_and_of_the_median_worker(history: History) -> None:
    write(history, *(step(i, weights_version=i, weights_copy_s=0.5, weights_encode_s=0.25) for i in range(20)))
    stages = {"sync_wire_s": 0.1, "sync_verify_s": 0.1, "sync_share_s": 0.1}
    write(history, {"step": 19, "sync_s": 0.4, "sync_load_s": 0.1, **stages}, file="rollout-w1")
    read(history)
    before = history.serial
    history.add_pulls([{"name": "far", "version": 19, "metrics": {"sync_s": 1.0, "sync_load_s": 0.7, **stages}}])
    assert history.serial > before
    rows = history.weights()
    assert [row["version"] for row in rows] == [*range(19, 19 - VERSIONS_SHOWN, -1)]
    assert rows[0]["copy_s"] == 0.5
    assert (rows[0]["workers"], rows[0]["slowest"], rows[0]["load_s"]) == (2, "far", pytest.approx(0.4))
    assert rows[1]["workers"] == 0


def test_evaluations_without_a_score_are_left_out(history: History) -> None:
    row = {"evaluation": "k", "dataset": "d", "version": 3, "step": 3, "mean_reward": 0.5, "low": 0.4, "high": 0.6, "num_samples": 9}
    write(history, row, row | {"version": 4, "mean_reward": None})
    read(history)
    assert list(history.evaluations) == [("d", 3)]

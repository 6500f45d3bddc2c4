"""The arithmetic of `bin/bench broker`: rows, goals, medians, what the load is made of."""

import math
from pathlib import Path
from typing import Any

import bench_broker
import bench_load
import bench_peers
import bench_streams
import pytest
from bench import markdown_table, table
from bench_row import absent, median_of, percentile, row, within
from rich.console import Console

from slimebus.bus.sample_table import check_group


def test_a_group_is_eight_samples_of_35_kilobytes() -> None:
    assert bench_load.SAMPLES == 8
    assert pytest.approx(35_000, rel=0.01) == bench_load.GROUP_BYTES / bench_load.SAMPLES
    assert [len(frame) for frame in bench_load.ARRAYS] == [8 * 3888 * size for size in (4, 1, 4)]


def test_the_put_of_the_load_is_one_that_a_broker_takes() -> None:
    assert len(check_group(bench_load.FRAMES, num_samples=8, newest=0).samples) == 8
    assert len(bench_load.FRAMES[0]) < 300


def test_a_goal_of_a_value_of_its_own_is_the_ratio_to_its_bound() -> None:
    assert within("a", 2500, "samples/s", ">=", 2000)["ok"]
    assert not within("a", 1999, "samples/s", ">=", 2000)["ok"]
    assert within("b", 19.9, "ms", "<=", 20)["ok"]
    assert not within("b", 20.1, "ms", "<=", 20)["ok"]
    assert within("b", 10, "ms", "<=", 20)["value"] == 10


def test_what_cannot_be_installed_says_so_and_misses_no_goal() -> None:
    rows = [absent("vs_redis", "redis-server is not installed"), row("put_memory_ratio", 3.0, "groups/s", 2.0, ">= 0.7")]
    assert all(made["ok"] for made in rows)
    console = Console(width=160, record=True)
    console.print(table("broker", rows))
    assert "redis-server is not installed" in console.export_text()


def test_rows_as_markdown_say_which_goal_is_missed() -> None:
    made = [row("memcpy", 9.0, "GB/s", 9.0, ""), row("encode_ratio", 4.5, "GB/s", 9.0, ">= 0.55"), absent("vs_redis", "not installed")]
    assert markdown_table(made).splitlines() == [
        "| name | value | unit | reference | ratio | goal |",
        "| --- | --- | --- | --- | --- | --- |",
        "| `memcpy` | 9.0 | GB/s | 9.0 | 1.0 |  |",
        "| `encode_ratio` | 4.5 | GB/s | 9.0 | 0.5 | >= 0.55, missed |",
        "| `vs_redis` |  | not installed |  |  |  |",
    ]


def test_the_first_turn_does_not_count_and_the_median_does() -> None:
    order: list[str] = []
    values = {"a": iter([99.0, 1.0, 5.0, 2.0]), "b": iter([0.0, 7.0, 8.0, 9.0])}

    def measure(name: str) -> Any:
        def take() -> float:
            order.append(name)
            return next(values[name])

        return take

    assert median_of(3, {name: measure(name) for name in values}) == {"a": 2.0, "b": 8.0}
    assert order == ["a", "b"] * 4, "they take turns"


def test_being_ahead_is_a_ratio_above_one_for_rates_latency_and_memory() -> None:
    ours = {"puts_per_s": 200.0, "gets_per_s": 300.0, "p99_ms": 5.0, "memory_mib": 50.0}
    theirs = {"puts_per_s": 100.0, "gets_per_s": 100.0, "p99_ms": 10.0, "memory_mib": 100.0}
    made = bench_peers.compare("vs_x", 3, lambda: ours, lambda: theirs)
    assert [(r["name"], r["ratio"], r["ok"]) for r in made] == [
        ("vs_x", 2.0, True),
        ("vs_x_gets", 3.0, True),
        ("vs_x_put_p99", 2.0, True),
        ("vs_x_memory", 2.0, True),
    ]
    assert not any(r["ok"] for r in bench_peers.compare("vs_x", 3, lambda: theirs, lambda: ours))


def test_rates_and_percentiles() -> None:
    assert bench_broker.rate({"groups": 100, "seconds": 0.5}) == 200
    assert bench_broker.rate({"messages": 10, "seconds": 2.0}) == 5
    assert [percentile(range(100), percent) for percent in (50, 99)] == [50, 99]
    assert math.isnan(percentile([]))


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="redis-server is not installed"):
        bench_streams.StreamServer("redis", tmp_path, "fsync")
    made, gets = bench_peers.stream_rows(tmp_path, 1, 64, "vs_redis", "redis", "fsync", "")
    assert (made["name"], gets["name"], made["value"]) == ("vs_redis", "vs_redis_gets", None)
    assert "apt-get install redis-server" in made["unit"]

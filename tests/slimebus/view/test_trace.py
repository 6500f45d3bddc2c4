import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slimebus.bus.errors import DataError
from slimebus.cli.commands.trace import trace as command
from slimebus.view import trace
from slimebus.view.trace import SpanRow


def span(name: str, begin: float, end: float, process: str = "trainer", **about: Any) -> SpanRow:
    return SpanRow(process, name, 1000.0 + begin, end - begin, about)


RUN = [
    span("train", 0, 2, cpu_s=1.9),  # the first one is left out
    span("publish", 2, 2.5, version=1),
    span("encode", 2.5, 3),
    span("train", 2.5, 4.5, cpu_s=1.0),
    span("publish", 4.5, 4.5),  # nothing was published
    span("train", 4.5, 6, cpu_s=1.1, queued_s=0.15),
    span("publish", 6, 6.5, version=2),
    span("pull", 3, 4, "worker-1", version=1),
    span("load", 4, 4.5, "worker-1", version=1),
    span("pull", 6.25, 6.5, "worker-2", version=2),
    span("pull", 5, 5.5, "worker-2", failed="WeightsError"),
    span("sample", 3.5, 5.5, "worker-1", group="0/1"),
    span("sample", 3, 4, "worker-1", group="0/2"),
]


def write(run_dir: Path, spans: list[SpanRow]) -> Path:
    (run_dir / "metrics").mkdir(parents=True)
    for one in spans:
        row = {"process": one.process, "name": one.name, "begin": one.begin, "seconds": one.seconds, **one.about}
        with (run_dir / "metrics" / f"spans-{one.process}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
    return run_dir


def test_chrome_trace_has_a_track_for_each_process_and_row() -> None:
    made = trace.chrome_trace(sorted(RUN, key=lambda s: s.begin))
    names = {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "trainer", 2: "worker-1", 3: "worker-2"}
    groups = [e for e in made["traceEvents"] if e.get("cat") == "groups"]
    assert len({e["tid"] for e in groups}) == 2, "groups that are sampled at once lie in two tracks"
    (load,) = [e for e in made["traceEvents"] if e["name"] == "load"]
    assert (load["ph"], load["ts"], load["dur"], load["args"]) == ("X", 4e6, 0.5e6, {"version": 1})


def test_runs_of_several_hosts_are_one_timeline(tmp_path: Path) -> None:
    ours, theirs = write(tmp_path / "a", RUN[:7]), write(tmp_path / "b", RUN[7:])
    assert trace.read([ours, theirs]) == sorted(RUN, key=lambda s: s.begin)


def test_a_directory_without_spans_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no spans on record \(metrics/spans-\*.jsonl\)"):
        trace.read([tmp_path])


def test_the_run_of_a_file_and_a_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "mine", RUN)
    (tmp_path / "run.yaml").write_text("name: other\n")
    done = CliRunner().invoke(command, ["run.yaml", "--name", "mine"])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "runs" / "mine" / "trace.json").read_text())["traceEvents"]


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, [str(write(tmp_path / "run", RUN)), "--out", str(tmp_path)])
    assert isinstance(done.exception, IsADirectoryError)
    assert done.exception.filename == str(tmp_path)


LIVES: dict[str, Any] = {
    "step": 7,
    "shift": 1000.0,
    "train_s": 2.0,
    "after_s": 1.0,
    "lives": {"0/1": [2, [["queued", 0.0], ["leased", 1.0], ["ready", 5.0], ["assigned", 6.0], ["committed", 10.0]]]},
}
WORKED = [
    span("generate", 1, 4, "w1", group="0/1", turns=[[[0.0, 1.0], [1.5, 0.5]], [[0.0, 3.0]]]),
    span("generate", -9, -8, "w2", group="0/1"),  # of an attempt long ago
    span("reward", 4, 4.5, "w1", group="0/1"),
    span("put", 4.5, 5, "w1", group="0/1"),
    span("sample", 1, 4.5, "w1", group="0/1"),
    span("train", 7, 9, step=7),
    span("train", 97, 99, step=70),
]


def test_a_step_is_the_life_of_each_of_its_samples_over_all_processes() -> None:
    made = trace.sample_lives(sorted([*WORKED, span("step", 0, 10, "broker", **LIVES)], key=lambda s: s.begin), 7)
    lives = {i: [s for s in made if s.lane == f"0/1 sample {i}"] for i in (0, 1)}
    shown = {i: [(s.name, s.begin - 1000, s.end - 1000) for s in life] for i, life in lives.items()}
    broker_before, after = [("queue", 0.0, 1.0)], [("reward", 4.0, 4.5), ("put", 4.5, 5.0)]
    after += [("ready", 5.0, 6.0), ("assigned", 6.0, 7.0), ("trained", 7.0, 9.0)]
    turns = [("generate", 1.0, 2.0), ("tool", 2.0, 2.5), ("generate", 2.5, 3.0)]
    assert shown == {0: [*broker_before, *turns, *after], 1: [*broker_before, ("generate", 1.0, 4.0), *after]}
    assert {s.about["by"] for s in lives[0]} == {"broker", "w1"}
    beside = [(s.process, s.name) for s in made if s.process in ("trainer", "w1")]
    assert ("trainer", "train") in beside
    assert sum(s.name == "train" for s in made) == 1, "what was done at other times is left out"


def test_a_step_without_the_workers_records_shows_its_lease() -> None:
    made = trace.sample_lives([span("step", 0, 10, "broker", **LIVES)], 7)
    assert [s.name for s in made if s.lane == "0/1 sample 1"] == ["queue", "lease", "ready", "assigned", "trained"]


def test_clocks_of_hosts_are_brought_to_the_brokers(tmp_path: Path) -> None:
    ahead = write(tmp_path / "b", [span("wait", 0, 1, "w1"), span("pull", 1, 2, "w1", offset=-5.0), span("x", 3, 4, "other")])
    here = write(tmp_path / "a", [span("step", 0, 10, "broker", **LIVES), span("train", 0, 1, offset=0.5)])
    found = {(s.process, s.name): s.begin - 1000 for s in trace.read([here, ahead])}
    assert found[("w1", "pull")] == -4.0
    assert found[("w1", "wait")] == -5.0, "before it was known it was the same"
    assert found[("other", "x")] == -2.0, "a process of the same host has the same clock"
    assert found[("trainer", "train")] == 0.5
    assert found[("broker", "step")] == 0.0


def test_the_command_writes_a_step_or_says_which_there_are(tmp_path: Path) -> None:
    run_dir = write(tmp_path / "run", [*WORKED, span("step", 0, 10, "broker", **LIVES)])
    done = CliRunner().invoke(command, [str(run_dir), "--step", "7"])
    assert done.exit_code == 0, done.output
    events = json.loads((run_dir / "trace-7.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"0/1 sample 0", "0/1 sample 1", "step"}
    done = CliRunner().invoke(command, [str(run_dir), "--step", "8"])
    assert isinstance(done.exception, DataError)
    assert "it has steps 7 to 7" in str(done.exception)
    done = CliRunner().invoke(command, [str(run_dir)])
    assert f"{len(WORKED)} spans" in done.output, "the broker's records of steps are no spans of work"


NO_SPANS: list[dict[str, Any]] = [
    {"name": "pull", "begin": 1.0, "seconds": 1.0},
    {"process": ["w"], "name": "pull", "begin": 1.0, "seconds": 1.0, "offset": 1.0},
    {"process": "w", "name": "pull", "begin": "soon", "seconds": 1.0},
    {"process": "w", "name": "pull", "begin": 1.0, "seconds": None},
    {"process": "w", "name": "pull", "begin": 1.0, "seconds": 1.0, "offset": "x"},
    {"process": "w", "name": "pull", "begin": 1.0, "seconds": 1.0, "group": []},
    {"process": "w", "name": "generate", "begin": 1.0, "seconds": 1.0, "group": "0/1", "turns": [3]},
    {"process": "broker", "name": "step", "begin": 1.0, "seconds": 1.0, "lives": {}},
    {"process": "broker", "name": "step", "begin": 1.0, "seconds": 1.0, **LIVES, "lives": {"0/1": [2, [["queued"]]]}},
]


def test_lines_that_are_no_spans_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = write(tmp_path, [*WORKED, span("step", 0, 10, "broker", **LIVES)])
    (run_dir / "metrics" / "spans-a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in NO_SPANS) + '{"process":"w","na\n')
    found = trace.read([run_dir])
    assert len(found) == len(WORKED) + 1
    assert trace.sample_lives(found, 7)
    assert f"{len(NO_SPANS)} lines" in caplog.text


@pytest.mark.parametrize("lives", [{}, {"0/1": [0, LIVES["lives"]["0/1"][1]]}, {"0/1": [2, [["queued", 0.0]]]}])
def test_a_step_without_spans_is_refused_in_words(lives: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="step 7 has no spans on record"):
        trace.sample_lives([span("step", 0, 10, "broker", **LIVES | {"lives": lives})], 7)

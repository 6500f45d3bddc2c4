import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slimebus.bus.errors import ConfigError, DataError, UsageError
from slimebus.process.launch import locked
from slimebus.sweep import runner
from slimebus.sweep.plan import Sweep, load
from slimebus.sweep.runner import Runner, reason_in


class FakeGroup:
    """Trials that end at once with the code that `codes` has for them. Each writes its evaluation."""

    codes: dict[str, int] = {}

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.started: list[tuple[str, Sequence[str], Any]] = []
        self.children: list[Any] = []
        FakeGroup.last = self  # type: ignore[attr-defined]

    def __enter__(self) -> "FakeGroup":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def start(self, role: str, arguments: Sequence[str], environment: Any) -> Any:
        self.started.append((role, arguments, environment))
        log = self.folder / f"{role}.log"
        lines = ["trainer | 1", "trainer | it broke: no such thing", "broker | bye"]
        log.write_text("\n".join([*lines, "slimebus: trainer ended with code 1 (log: x); ending the others", ""]))
        write_records(self.folder.parent / "trials" / role)
        process = SimpleNamespace(poll=lambda: self.codes.get(role, 0))
        self.children.append(SimpleNamespace(process=process, log_file=log, kill=lambda: None))
        return self.children[-1]


def write_records(run_dir: Path) -> None:
    metrics = run_dir / "metrics"
    metrics.mkdir(parents=True, exist_ok=True)
    (metrics / "trainer.jsonl").write_text(json.dumps({"step": 0, "elapsed_s": 1.0}) + "\n")
    row = {"evaluation": "k", "dataset": "heldout", "version": 0, "mean_reward": 0.5, "low": 0.4, "high": 0.6}
    (metrics / "broker.jsonl").write_text(json.dumps(row) + "\n")


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    return sweep_of(tmp_path, monkeypatch)


def sweep_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, codes: dict[str, int] | None = None, **tree: Any) -> Sweep:
    (tmp_path / "run.yaml").write_text("name: base\n")
    usual = {"run": "run.yaml", "sweep_dir": str(tmp_path / "out"), "grid": {"broker.max_staleness": [0, 1, 2]}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(usual | tree))
    monkeypatch.setattr(runner, "ProcessGroup", FakeGroup)
    monkeypatch.setattr(runner, "POLL_S", 0.0)
    monkeypatch.setattr(runner, "asked_refusals", lambda sweep: {})
    monkeypatch.setattr(FakeGroup, "codes", codes or {})
    return load(tmp_path / "s.yaml")


def states(sweep: Sweep) -> list[tuple[str, int]]:
    outcomes = [runner.read_outcome(sweep, trial) for trial in sweep.trials]
    return [(outcome.state, outcome.starts) for outcome in outcomes]


def names(sweep: Sweep) -> list[str]:
    return [trial.name for trial in sweep.trials]


def test_every_trial_is_run_once_however_often_the_sweep_is_started(sweep: Sweep) -> None:
    Runner(sweep, print).run()
    assert states(sweep) == [("done", 1)] * 3
    assert [role for role, _, _ in FakeGroup.last.started] == names(sweep)  # type: ignore[attr-defined]
    Runner(sweep, print).run()
    assert states(sweep) == [("done", 1)] * 3


def test_a_trial_that_was_running_when_the_sweep_was_killed_is_gone_on_with(sweep: Sweep) -> None:
    first = Runner(sweep, print)
    first.outcomes[names(sweep)[0]].state = "running"
    first.outcomes[names(sweep)[0]].starts = 1
    runner.write_outcome(sweep, sweep.trials[0], first.outcomes[names(sweep)[0]])
    lines: list[str] = []
    Runner(sweep, lines.append).run()
    assert states(sweep) == [("done", 2), ("done", 1), ("done", 1)]
    assert lines[0] == "[1/3] max_staleness=0,seed=0: begins, start 2"


def test_a_trial_that_fails_is_a_line_with_its_reason_and_the_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path, monkeypatch, codes={"max_staleness=1,seed=0": 1})
    lines: list[str] = []
    Runner(sweep, lines.append).run()
    assert [state for state, _ in states(sweep)] == ["done", "failed", "done"]
    assert any("max_staleness=1,seed=0: failed after 0 s: it broke: no such thing" in line for line in lines)
    Runner(sweep, print).run()
    assert states(sweep)[1] == ("failed", 1), "not run again by itself"
    monkeypatch.setattr(FakeGroup, "codes", {})
    (sweep.run_dir(sweep.trials[1]) / "trial.json").unlink()
    Runner(sweep, print).run()
    assert states(sweep)[1] == ("done", 1)


def test_a_refused_config_is_a_line_and_is_never_started(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "asked_refusals", lambda sweep: {names(sweep)[1]: ["a contradicts b"]})
    Runner(sweep, print).run()
    assert states(sweep) == [("done", 1), ("refused", 0), ("done", 1)]
    assert runner.read_outcome(sweep, sweep.trials[1]).reason == "a contradicts b"


@pytest.mark.parametrize("problems", [["no 'tiss'; did you mean 'tis'?"], None])
def test_a_wrong_name_or_a_sweep_of_which_nothing_can_run_is_refused(sweep: Sweep, monkeypatch: pytest.MonkeyPatch, problems: Any) -> None:
    found = {names(sweep)[0]: problems} if problems else {name: ["no model"] for name in names(sweep)}
    monkeypatch.setattr(runner, "asked_refusals", lambda sweep: found)
    with pytest.raises(ConfigError, match="did you mean 'tis'" if problems else "^no model$"):
        Runner(sweep, print).run()
    assert states(sweep) == [("new", 0)] * 3


def test_parallel_trials_get_their_share_of_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = sweep_of(tmp_path, monkeypatch, parallel=3, gpus=[0, 1, 2, 3, 4, 5], workers=2)
    Runner(sweep, print).run()
    started = FakeGroup.last.started  # type: ignore[attr-defined]
    assert [environment for _, _, environment in started] == [{"CUDA_VISIBLE_DEVICES": ids} for ids in ("0,1", "2,3", "4,5")]
    assert all(arguments[-2:] == ["--workers", "2"] for _, arguments, _ in started)


@pytest.mark.parametrize("value", [float("inf"), 1e300, 10**30, [float("inf")]])
def test_a_sweep_with_an_infinite_option_can_be_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any) -> None:
    sweep = sweep_of(tmp_path, monkeypatch, grid={"broker.max_staleness": [value]})
    Runner(sweep, print).run()
    assert states(sweep) == [("done", 1)]


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"{}", b"\xff", b'{"condition":{},"options":{},"seed":0,"state":"hm"}'])
def test_a_spoilt_trial_json_is_named(sweep: Sweep, junk: bytes) -> None:
    file = sweep.run_dir(sweep.trials[0]) / "trial.json"
    file.parent.mkdir(parents=True)
    file.write_bytes(junk)
    with pytest.raises(DataError, match=r"trial\.json is spoilt"):
        Runner(sweep, print)


def test_the_reason_is_the_last_words_of_the_process_that_failed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("slimebus: broker.bind: in use\n")
    assert reason_in(log, 2) == "broker.bind: in use"
    log.write_text("")
    assert reason_in(log, 3) == "exit code 3"


def test_other_options_under_the_same_name_are_refused(sweep: Sweep, tmp_path: Path) -> None:
    Runner(sweep, print).run()
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"set": {"optimizer.lr": 3.0}}))
    with pytest.raises(UsageError, match=r"begun with another optimizer\.lr"):
        Runner(load(file), print)


def test_one_process_at_a_time_runs_a_sweep(sweep: Sweep) -> None:
    sweep.folder.mkdir()
    with locked(sweep.folder / "lock", 0.0), pytest.raises(UsageError, match="another process runs this sweep"):
        Runner(sweep, print).run()

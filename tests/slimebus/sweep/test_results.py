import json
from pathlib import Path

import pytest
from run_records import write_run

from slimebus.bus.errors import DataError
from slimebus.sweep import results
from slimebus.sweep.results import bucket_of, conditions_by_settings, group_by_condition, read_runs
from slimebus.view.run_status import last_status


def test_a_run_is_summed_up_from_its_records(tmp_path: Path) -> None:
    (found,) = read_runs([write_run(tmp_path / "a", **{"mismatch/lag": 4.0, "mismatch/mean": 0.02})])
    assert [(p.steps, p.seconds, p.samples, p.score) for p in found.points] == [
        (0, 0.0, 0.0, 0.0),
        (5, pytest.approx(5.0), 40.0, 0.25),
        (10, pytest.approx(10.0), 80.0, 0.5),
    ]
    assert all(p.is_rate for p in found.points)
    assert (found.score_name, found.state, found.seed, found.lag_mean) == ("heldout", "done", 0, 1.0)
    assert found.samples_per_s == pytest.approx(8.0)
    assert found.means == {"m2": pytest.approx(0.3)}
    assert found.by_lag == {"1": {"m2": pytest.approx(0.1), "loss": pytest.approx(0.2)}, "3-4": {"mismatch": pytest.approx(0.02)}}


def test_versions_of_several_steps_are_counted_in_steps(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", settings={"weights.update_weights_interval": "2"})
    assert [point.steps for point in read_runs([run])[0].points] == [0, 10, 10], "two steps a version, and ten were trained"


def test_wall_time_leaves_out_that_a_run_was_interrupted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    rows = [json.loads(line) for line in (run / "metrics/trainer.jsonl").read_text().splitlines()]
    again = [row | {"elapsed_s": 0.5, "time": row["time"] + 3600} for row in rows[6:]]
    (run / "metrics/trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows[:8], *again]))
    assert read_runs([run])[0].points[-1].seconds == pytest.approx(10.0)


def test_a_run_without_evaluations_is_compared_by_its_last_rewards(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", reward=0.7)
    (run / "metrics" / "broker.jsonl").unlink()
    (found,) = read_runs([run])
    assert (found.score_name, found.score, found.points[0].steps) == ("reward", pytest.approx(0.7), 10)


def test_a_score_that_a_run_has_not_is_refused_with_those_that_it_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no evaluation 'heldoud' on record; it has easy, heldout"):
        read_runs([write_run(tmp_path / "a")], score="heldoud")


def test_runs_that_differ_in_their_seed_alone_are_one_condition(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{eta}-{seed}", eta=eta, seed=seed) for eta in (16, 2, 8) for seed in (0, 1)]
    found = group_by_condition(read_runs(runs))
    assert {key: [r.seed for r in of] for key, of in found.items()} == {("2",): [0, 1], ("8",): [0, 1], ("16",): [0, 1]}
    assert list(found) == [("2",), ("8",), ("16",)], "as numbers"
    assert read_runs(runs[:2])[0].condition == {}


def test_a_run_whose_bound_the_broker_chose_is_not_among_those_of_its_last_bound(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), eta=4, seed=seed) for seed in (0, 1)]
    config = {"base": str(tmp_path), "config": {"broker": {"max_staleness": "auto"}}}
    (runs[1] / "config.json").write_text(json.dumps(config))
    assert set(group_by_condition(read_runs(runs))) == {("4",), ("auto",)}


def test_runs_are_told_apart_by_what_their_settings_differ_in() -> None:
    eta = results.ETA
    grid = [{eta: e, "optimizer.lr": lr, "optimizer.min_lr": lr, "seed": s} for e in "02" for lr in "ab" for s in "01"]
    assert conditions_by_settings(grid, eta)[0] == {"settings": "lr=a, min_lr=a", eta: "0"}
    assert conditions_by_settings([{"x.a": "1"}, {"x.a": "2"}], eta) == [{"x.a": "1"}, {"x.a": "2"}]
    together = [{eta: "0", "optimizer.lr": "a"}, {eta: "2", "optimizer.lr": "b"}]
    assert conditions_by_settings(together, eta) == [{"settings": "max_staleness=0, lr=a"}, {"settings": "max_staleness=2, lr=b"}]


def test_runs_whose_settings_are_not_on_record_stand_each_for_itself(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run in runs:
        (run / "status.json").unlink()
        (run / "trainer-settings.json").unlink()
    assert [r.condition for r in read_runs(runs)] == [{"run": str(run)} for run in runs]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no trained step on record"):
        read_runs([tmp_path])
    run = write_run(tmp_path / "a")
    (run / "metrics" / "trainer.jsonl").write_text('{"of": "something else"}\n')
    with pytest.raises(DataError, match="no trained step on record"):
        read_runs([run])


@pytest.mark.parametrize("name", ["status.json", "trainer-settings.json"])
@pytest.mark.parametrize("text", ["", '{"set', "[1]", "[" * 100_000])
def test_a_file_that_a_full_disk_or_a_hand_damaged_is_named(tmp_path: Path, name: str, text: str) -> None:
    run = write_run(tmp_path / "a")
    (run / name).write_text(text)
    with pytest.raises(DataError, match=f"a/{name} is damaged: .*; take another run, or remove the file"):
        read_runs([run])
    assert name != "status.json" or last_status(run) is None


@pytest.mark.parametrize(("lag", "bucket"), [(0.0, "0"), (0.6, "1"), (2.4, "2"), (2.6, "3-4"), (4.4, "3-4"), (8.0, "5-8"), (31.5, "9+")])
def test_buckets_are_those_of_the_trainer(lag: float, bucket: str) -> None:
    assert bucket_of(lag) == bucket
    assert len(results.BUCKETS) == 6


def test_a_run_that_is_not_finished_does_not_count(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run, state in zip(runs, ("finished", "running"), strict=True):
        (run / "status.json").write_text(json.dumps({"settings": {"max_staleness": 1}, "state": state, "step": 52}))
    done, going = sorted(read_runs(runs), key=lambda found: found.name)
    assert (done.counts, going.counts, going.reason) == (True, False, "running at step 52")


def test_runs_of_other_rewards_or_evaluations_are_told_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("a", "b")]
    for run, reward in zip(runs, ("r.py:f (hash 1)", "r.py:f (hash 2)"), strict=True):
        (run / "config.json").write_text(json.dumps({"config": {}, "recorded": {"rollout.custom_rm_path": reward}}))
    assert [found.condition for found in read_runs(runs)] == [{"rollout.custom_rm_path": f"r.py:f (hash {i})"} for i in (1, 2)]

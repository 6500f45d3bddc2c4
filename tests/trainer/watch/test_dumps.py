"""Steps that went wrong, on disk."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_disk import fill, small_disk

from slimebus.bus.errors import SlimebusError
from slimebus.client.exported_groups import read_groups, step_folders
from slimebus.config import RunConfig
from trainer.batches.batch import TrainingGroup
from trainer.session.replay import ReplaySource, random_file
from trainer.session.step_batch import StepBatch, StepPlan
from trainer.watch.dumps import MAX_DUMPS, MIN_STEPS, Dumps, SampleDump, SpikeDetector
from trainer.watch.step_watch import StepWatch


@pytest.fixture
def resolved(tmp_path: Path):
    return SimpleNamespace(run_dir=tmp_path, base=tmp_path, config=RunConfig(), origin={})


def test_a_spike_is_ten_times_the_median_and_not_counted_in_it() -> None:
    detector = SpikeDetector()
    assert not any(detector.is_spike(value) for value in (1000.0, *[1.0, -1.2, 0.8] * MIN_STEPS))
    assert [detector.is_spike(value) for value in (9.0, 11.0, -11.0, 1e9, 1.0)] == [False, True, True, True, False]
    quiet = SpikeDetector(least=0.5)
    assert not any(quiet.is_spike(value) for value in (*[1e-9] * MIN_STEPS, 1e-3))


def test_a_run_dumps_a_few_steps_and_says_how_to_train_them_again(resolved, make_batch, caplog):
    dumps = Dumps(resolved, Path("run.yaml"), 0)
    for step in range(MAX_DUMPS + 2):
        dumps.write("nonfinite", step, StepBatch(step, step, step, make_batch(step), [0]), {"loss": float("nan")}, {})
    folders = sorted((resolved.run_dir / "dumps").iterdir())
    assert [folder.name for folder in folders] == [f"step_{step:08d}-nonfinite" for step in range(MAX_DUMPS)]
    about = json.loads((folders[1] / "dump.json").read_text())
    assert (about["step"], about["reason"], about["metrics"], about["checkpoint"]) == (1, "nonfinite", {"loss": "nan"}, None)
    said = [record.getMessage() for record in caplog.records]
    assert f"step 0 (nonfinite) is dumped; to train it again: slimebus trainer run.yaml --replay {folders[0]}" in said
    assert sum("is not dumped" in line for line in said) == 2
    Dumps(resolved, None, 0).write("nonfinite", 99, None, {}, {})
    assert len(list((resolved.run_dir / "dumps").iterdir())) == MAX_DUMPS, "a run that goes on counts those before"


def test_a_dump_on_a_full_disk_ends_nothing(resolved, make_batch, caplog):
    with small_disk(resolved.run_dir / "dumps", 1) as disk:
        dumps = Dumps(resolved, None, 0)
        fill(disk)
        dumps.write("nonfinite", 0, StepBatch(0, 0, 0, make_batch(0), [0]), {}, {"torch": torch.zeros(5000, dtype=torch.uint8)})
        assert re.search(r"step 0 \(nonfinite\) cannot be dumped: .*No space left on device", caplog.text)


def test_a_dump_is_replayed_as_it_was(resolved, make_batch):
    groups = make_batch(3)
    for sample in groups[0].samples:
        sample.extras["teacher_logprobs"] = np.zeros(len(sample.tokens), np.float32)
    Dumps(resolved, None, 0).write("spike-loss", 7, StepBatch(7, 5, 6, groups, [0]), {}, {})
    source = ReplaySource(resolved.run_dir / "dumps" / "step_00000007-spike-loss", resolved)
    source.begin(SimpleNamespace(step=7), None, 38)
    batch = source.take_batch(7, 0.0)
    assert (source.first_step, batch.version, [group.id for group in batch.groups]) == (7, 5, [group.id for group in groups])
    for got, want in zip(batch.samples, (sample for group in groups for sample in group.samples), strict=True):
        assert (got.reward, got.versions, got.extras.keys()) == (want.reward, want.versions, want.extras.keys())
        assert got.tokens.tolist() == want.tokens.tolist()
        assert got.rollout_logprobs.tolist() == want.rollout_logprobs.tolist()


def test_a_step_that_is_not_finite_is_dumped_also_when_it_ends_the_run(resolved, tied_model, build_policy, make_batch):
    policy = build_policy(tied_model, on_nonfinite="stop")
    watch = StepWatch(resolved, None, policy, profile=range(0, 1))
    groups = make_batch(0)
    metrics = watch.train(0, StepBatch(0, 0, 1, groups, [0]), StepPlan(1), version=0)
    assert metrics["tokens_per_s"] > 0
    for group in groups:
        group.has_gradient = False
    assert watch.speed.of(StepBatch(0, 0, 1, groups, [0]), 0.001)["tokens_per_s"] == 0.0, "what is left out takes no time"
    assert "mfu" not in metrics, "of a CPU no peak is known"
    assert (resolved.run_dir / "profile" / "trace-rank0.json.gz").stat().st_size > 1000
    with torch.no_grad():
        next(policy.model.gpt.parameters()).fill_(float("nan"))
    with pytest.raises(SlimebusError, match="was not finite"):
        watch.train(1, StepBatch(1, 1, 2, make_batch(1), [0]), StepPlan(1), version=1)
    assert random_file(resolved.run_dir / "dumps" / "step_00000001-nonfinite", 0).exists()


@pytest.fixture
def batch_of(make_batch):
    """The batch of a step, whose groups are its own."""

    def make(step: int) -> StepBatch:
        groups = [TrainingGroup(f"{step}/{i}", group.samples) for i, group in enumerate(make_batch(step))]
        return StepBatch(step, step, step + 1, groups, [0] * sum(len(group.samples) for group in groups))

    return make


def kept(folder: Path) -> dict[str, int]:
    return {place.name: sum(group.num_samples for group in read_groups(place)) for place in sorted((folder / "samples").iterdir())}


def test_the_newest_steps_are_kept_and_never_more_samples_than_the_limit(tmp_path: Path, batch_of) -> None:
    size = len(batch_of(0).samples)
    dump = SampleDump(tmp_path, 2 * size + 1)
    for step in range(4):
        dump.add(batch_of(step))
        assert sum(kept(tmp_path).values()) <= 2 * size + 1
    assert kept(tmp_path) == {"step_00000002": size, "step_00000003": size}
    SampleDump(tmp_path, 2 * size + 1).add(batch_of(4))
    assert list(kept(tmp_path)) == ["step_00000003", "step_00000004"], "a trainer that goes on counts those before"


def test_a_trainer_that_went_back_replaces_the_steps_of_before(tmp_path: Path, batch_of) -> None:
    dump = SampleDump(tmp_path, 10_000)
    for step in (0, 1, 2):
        dump.add(batch_of(step))
    SampleDump(tmp_path, 10_000).add(batch_of(1))
    assert list(kept(tmp_path)) == ["step_00000000", "step_00000001"]


def test_of_a_batch_beyond_the_limit_whole_groups_are_kept(tmp_path: Path, batch_of) -> None:
    batch = batch_of(0)
    first = len(batch.groups[0].samples)
    SampleDump(tmp_path, first + 1).add(batch)
    assert kept(tmp_path) == {"step_00000000": first}
    SampleDump(tmp_path / "none", first - 1).add(batch)
    assert not (tmp_path / "none").exists()


def test_what_is_kept_is_replayed_step_by_step(tmp_path: Path, batch_of) -> None:
    dump = SampleDump(tmp_path, 10_000)
    batches = [batch_of(step) for step in (5, 6)]
    for batch in batches:
        dump.add(batch)
    resolved = SimpleNamespace(run_dir=tmp_path / "run", base=tmp_path, config=RunConfig(), origin={})
    source = ReplaySource(tmp_path / "samples", resolved)
    source.begin(SimpleNamespace(step=5), None, 38)
    for want in batches:
        got = source.take_batch(want.step, 0.0)
        assert (got.version, [group.id for group in got.groups]) == (want.version, [group.id for group in want.groups])
        assert [s.tokens.tolist() for s in got.samples] == [s.tokens.tolist() for s in want.samples]
        assert [s.rollout_logprobs.tolist() for s in got.samples] == [s.rollout_logprobs.tolist() for s in want.samples]


def test_one_that_a_power_cut_left_unreadable_goes_first_and_a_full_disk_ends_nothing(tmp_path: Path, batch_of, caplog) -> None:
    torn = tmp_path / "samples" / "step_00000000"
    torn.mkdir(parents=True)
    (torn / "groups.jsonl").write_text('{"gro')
    SampleDump(tmp_path, 1000).add(batch_of(1))
    assert list(kept(tmp_path)) == ["step_00000001"]
    (tmp_path / "file").write_text("")
    SampleDump(tmp_path / "file", 1000).add(batch_of(2))
    assert "the samples of step 2 cannot be kept" in caplog.text
    with small_disk(tmp_path / "small", 1) as disk:
        fill(disk)
        SampleDump(disk, 1000).add(batch_of(3))
        assert re.search("the samples of step 3 cannot be kept: .*No space left on device", caplog.text)


@pytest.mark.parametrize("name", ["step_notes", "step_", "step_00000001.bak", "step_-1"])
def test_other_names_beside_the_steps_are_left_alone(tmp_path: Path, batch_of, name: str) -> None:
    (tmp_path / "samples" / name).mkdir(parents=True)
    size = len(batch_of(0).samples)
    SampleDump(tmp_path, size).add(batch_of(1))
    assert (tmp_path / "samples" / name).exists()
    assert list(step_folders(tmp_path / "samples")) == [1]


def test_a_step_that_someone_removed_does_not_end_keeping(tmp_path: Path, batch_of, caplog) -> None:
    dump = SampleDump(tmp_path, 2 * len(batch_of(0).samples))
    for step in range(4):
        dump.add(batch_of(step))
        shutil.rmtree(tmp_path / "samples" / "step_00000000", ignore_errors=True)
    assert list(kept(tmp_path)) == ["step_00000002", "step_00000003"]
    assert not caplog.text

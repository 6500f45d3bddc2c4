"""Steps that went wrong, on disk."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_disk import fill, small_disk

from slimebus.bus.errors import SlimebusError
from slimebus.config import RunConfig
from trainer.session.replay import ReplaySource, random_file
from trainer.session.step_batch import StepBatch, StepPlan
from trainer.watch.dumps import MAX_DUMPS, MIN_STEPS, Dumps, SpikeDetector
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
    batch = source.take(7, 0.0)
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

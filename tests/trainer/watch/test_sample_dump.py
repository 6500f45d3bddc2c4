"""The newest trained samples, on disk."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_disk import fill, small_disk

from slimebus.client.exported_groups import read_groups, step_folders
from slimebus.config import RunConfig
from trainer.batches.batch import Group
from trainer.session.replay import ReplaySource
from trainer.session.step_batch import StepBatch
from trainer.watch.sample_dump import SampleDump


@pytest.fixture
def batch_of(make_batch):
    """The batch of a step, whose groups are its own."""

    def make(step: int) -> StepBatch:
        groups = [Group(f"{step}/{i}", group.samples) for i, group in enumerate(make_batch(step))]
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
        got = source.take(want.step, 0.0)
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

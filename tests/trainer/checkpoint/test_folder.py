"""A folder of checkpoints beside what killed saves and people leave in it."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from slimebus.bus.errors import DataError, Fenced
from trainer.checkpoint.folder import complete_and_prune, latest_checkpoint, oldest_step, saved_step
from trainer.checkpoint.schedule import CheckpointSchedule


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "state.json").write_text("{}")
    return path


def test_a_save_that_was_killed_after_its_state_was_written_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step_00000005", "step_00000010", "step_00000001.part", "step_best"):
        checkpoint(tmp_path, name)
    (tmp_path / "latest").write_text("step_00000010")
    assert (oldest_step(tmp_path), saved_step(tmp_path)) == (5, 10)
    complete_and_prune(checkpoint(tmp_path, "step_00000015.part"), tmp_path / "step_00000015", keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001.part", "step_00000010", "step_00000015", "step_best"]


@pytest.mark.parametrize("name", ["step_00000010.part", "step_best", "../other/step_00000010", ""])
def test_a_pointer_to_what_is_no_checkpoint_is_a_clear_error(name: str, tmp_path: Path) -> None:
    if name and "/" not in name:
        checkpoint(tmp_path, name)
    (tmp_path / "latest").write_text(name)
    with pytest.raises(DataError, match="which is not a complete checkpoint"):
        latest_checkpoint(tmp_path)


def test_a_trainer_whose_checkpoint_is_not_the_newest_any_more_stops(tmp_path: Path) -> None:
    resolved = Mock(run_dir=tmp_path)
    resolved.config.trainer.save_hf = ""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    schedule = CheckpointSchedule(resolved)
    schedule.check_newest()
    complete_and_prune(checkpoint(folder, "step_00000005.part"), folder / "step_00000005", keep=2)
    with pytest.raises(Fenced, match="saved step 5 since this one has loaded step 0; start this one again"):
        schedule.check_newest()
    schedule.saved_step = 5
    schedule.check_newest()

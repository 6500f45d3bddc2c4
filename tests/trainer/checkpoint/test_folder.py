"""A folder of checkpoints beside what killed saves and people leave in it."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from slimebus.bus.errors import DataError, Fenced
from trainer.checkpoint import folder as folders
from trainer.checkpoint.folder import latest_checkpoint, loadable_checkpoints, oldest_step, saved_step
from trainer.checkpoint.schedule import CheckpointSchedule


def checkpoint(folder: Path, name: str) -> Path:
    path = folder / name
    path.mkdir()
    (path / "state.json").write_text("{}")
    return path


def complete_and_prune(building: Path, target: Path, keep: int) -> None:
    folders.move_into_place(building, target, b"{}")
    folders.write_latest(target)
    folders.prune(target, keep)


def test_a_save_that_was_killed_after_its_state_was_written_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("step_00000005", "step_00000010", "step_00000001.part", "step_best"):
        checkpoint(tmp_path, name)
    (tmp_path / "latest").write_text("step_00000010")
    assert (oldest_step(tmp_path), saved_step(tmp_path)) == (5, 10)
    complete_and_prune(checkpoint(tmp_path, "step_00000015.part"), tmp_path / "step_00000015", keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000001.part", "step_00000010", "step_00000015", "step_best"]


@pytest.mark.parametrize("name", ["step_00000010.part", "step_best", "../other/step_00000010", "", "step_" + "9" * 300])
def test_a_pointer_to_what_is_no_checkpoint_is_a_clear_error(name: str, tmp_path: Path) -> None:
    if name and "/" not in name and len(name) < 200:
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


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_what_may_be_loaded_is_what_latest_names_and_what_is_older(tmp_path: Path) -> None:
    assert loadable_checkpoints(tmp_path) == []
    for step in (5, 10, 15):
        checkpoint(tmp_path, f"step_{step:08d}")
    assert names(loadable_checkpoints(tmp_path)) == ["step_00000015", "step_00000010", "step_00000005"], "latest is lost"
    (tmp_path / "latest").write_text("step_00000010")
    assert names(loadable_checkpoints(tmp_path)) == ["step_00000010", "step_00000005"], "who points at an older one wants it"
    (tmp_path / "latest").write_bytes(b"\xff\x00")
    assert names(loadable_checkpoints(tmp_path)) == ["step_00000015", "step_00000010", "step_00000005"]


def test_a_damaged_checkpoint_is_set_aside_until_the_next_save(tmp_path: Path) -> None:
    old, new = checkpoint(tmp_path, "step_00000005"), checkpoint(tmp_path, "step_00000010")
    for _ in range(2):  # two nodes that share a disk
        folders.set_aside_damaged(new)
    folders.write_latest(old)
    assert (saved_step(tmp_path), oldest_step(tmp_path)) == (5, 5)
    assert (tmp_path / "step_00000010.damaged" / "state.json").exists()
    complete_and_prune(checkpoint(tmp_path, "step_00000010.part"), new, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_00000005", "step_00000010"]


def test_a_checkpoint_that_another_node_has_completed_is_left_alone(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "step_00000010")
    folders.move_into_place(tmp_path / "step_00000010.part", target, b"{}")
    assert (target / "state.json").exists()


def test_after_going_back_the_new_checkpoints_are_kept_and_those_of_the_timeline_that_was_left_are_removed(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint(tmp_path, f"step_{step:08d}")
    (tmp_path / "latest").write_text("step_00000010")
    for step in (11, 12, 13):
        complete_and_prune(checkpoint(tmp_path, f"step_{step:08d}.part"), tmp_path / f"step_{step:08d}", keep=3)
        assert saved_step(tmp_path) == step
    assert names(folders.complete_checkpoints(tmp_path)) == ["step_00000011", "step_00000012", "step_00000013"]


def test_a_latest_that_is_a_folder_is_one_clear_error(tmp_path: Path) -> None:
    checkpoint(tmp_path, "step_00000005")
    (tmp_path / "latest").mkdir()
    with pytest.raises(DataError, match="latest: Is a directory; it is a file with the name of a checkpoint"):
        loadable_checkpoints(tmp_path)


def test_a_file_in_the_way_is_removed(tmp_path: Path) -> None:
    (tmp_path / "step_00000003.part").write_text("")
    folders.clear_unfinished(tmp_path)
    assert not list(tmp_path.iterdir())

"""Checkpoints that are not what was written: the one before takes their place, and the log says so."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from saved_checkpoint import save_checkpoint

from slimebus.bus.errors import DataError
from trainer.checkpoint.folder import loadable_checkpoints, saved_step
from trainer.checkpoint.load import load_checkpoint, load_weights


def truncate(checkpoint: Path) -> None:
    path = checkpoint / "rank_00000.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        content = bytearray((checkpoint / name).read_bytes())
        content[len(content) // 2] ^= 1
        (checkpoint / name).write_bytes(content)

    return damage


def remove(name: str) -> Callable[[Path], None]:
    return lambda checkpoint: (checkpoint / name).unlink()


def empty_pointer(checkpoint: Path) -> None:
    (checkpoint.parent / "latest").write_text("")
    flip("rank_00000.safetensors")(checkpoint)


def nest_manifest(checkpoint: Path) -> None:
    path = checkpoint / "state.json"
    path.write_bytes(path.read_bytes().replace(b'"step":2', b'"x":' + b"[" * 100_000 + b',"step":2', 1))


def swap_manifest(checkpoint: Path) -> None:
    (checkpoint / "state.json").write_bytes((checkpoint.parent / "step_00000001" / "state.json").read_bytes())


DAMAGE = {
    "truncated": (truncate, "rank_00000.safetensors, written on .*, has [0-9]+ of [0-9]+ bytes"),
    "flipped": (flip("rank_00000.safetensors"), r"rank_00000.safetensors on .* is not what was written \(BLAKE3\)"),
    "missing": (remove("rank_00000.safetensors"), "rank_00000.safetensors, written on .*, is missing"),
    "flipped manifest": (flip("state.json"), "state.json is not what was written"),
    "nested manifest": (nest_manifest, "state.json is not what was written"),
    "no manifest": (remove("state.json"), "state.json: No such file or directory"),
    "manifest of another step": (swap_manifest, "state.json is that of step 1"),
    "empty pointer": (empty_pointer, "is not what was written"),
}


@pytest.fixture
def two_checkpoints(tied_model, build_policy, make_batch, tmp_path):
    """Of step 1 and 2, and what step 1 trains."""
    policy = build_policy(tied_model)
    policy.train(make_batch(0))
    save_checkpoint(tmp_path, policy, 1)
    metrics = policy.train(make_batch(1))
    save_checkpoint(tmp_path, policy, 2)
    return tmp_path, metrics


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_latest_falls_back_to_the_one_before(kind, two_checkpoints, tied_model, build_policy, make_batch, caplog):
    folder, metrics = two_checkpoints
    damage, said = DAMAGE[kind]
    damage(folder / "step_00000002")
    resumed = build_policy(tied_model)
    found = load_checkpoint(folder, resumed)
    assert found is not None
    assert found.step == 1
    assert resumed.train(make_batch(1)) == metrics
    lines = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(lines) == 1
    assert re.search(f"step_00000002 is damaged: .*{said}", lines[0]), lines[0]
    assert "going on from step_00000001: step 1 is trained again" in lines[0]
    assert saved_step(folder) == 1
    save_checkpoint(folder, resumed, 2)
    assert [path.name for path in loadable_checkpoints(folder)] == ["step_00000002", "step_00000001"]


@pytest.mark.parametrize("text", [None, "", "nonsense", "../step_00000001", "step_00000099", "step_" + "9" * 5000])
def test_without_a_latest_that_can_be_used_it_is_made_to_name_the_newest(text, two_checkpoints, tied_model, build_policy, caplog):
    folder, _ = two_checkpoints
    (folder / "latest").unlink()
    if text is not None:
        (folder / "latest").write_text(text)
    found = load_checkpoint(folder, build_policy(tied_model))
    assert found is not None
    assert found.step == saved_step(folder) == 2
    assert "going on from" in caplog.text
    assert len(caplog.text) < 1000


def test_when_all_are_damaged_training_does_not_begin_anew_by_itself(two_checkpoints, tied_model, build_policy):
    folder, _ = two_checkpoints
    for step in (1, 2):
        truncate(folder / f"step_0000000{step}")
    with pytest.raises(DataError, match=r"no checkpoint is whole \(step_00000002: .*; step_00000001: .*\); bring the files back, "):
        load_checkpoint(folder, build_policy(tied_model))


def test_an_export_takes_no_other_step_than_it_was_asked_for(two_checkpoints, tied_model, build_policy):
    folder, _ = two_checkpoints
    truncate(folder / "step_00000002")
    policy = build_policy(tied_model)
    for step in (None, 2):
        with pytest.raises(DataError, match=r"step_00000002: rank_00000.safetensors, .* has .*; .* take the checkpoint of another step"):
            load_weights(folder, policy, step)
    found = load_weights(folder, policy, 1)
    assert found is not None
    assert found.step == 1
    assert saved_step(folder) == 2, "looking changes nothing"


def test_a_checkpoint_of_another_model_is_refused_before_anything_changes(two_checkpoints, tied_model, untied_model, build_policy):
    folder, _ = two_checkpoints
    other = build_policy(untied_model)
    before = {name: tensor.clone() for name, tensor in other.export.tensors()}
    with pytest.raises(DataError, match=r"of another model: output_layer.weight has shape .* here, there no such tensor"):
        load_checkpoint(folder, other)
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.export.tensors())

"""Saving and resuming: bitwise, atomic, and bounded in number."""

import pytest
import torch
from saved_checkpoint import save_checkpoint

from slimebus.bus.errors import Fenced
from trainer.checkpoint.folder import Progress, latest_checkpoint
from trainer.checkpoint.load import load_checkpoint


def weights(policy):
    return {name: tensor.clone() for name, tensor in policy.export.tensors()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_three_steps_then_resume_for_three_equals_six_steps_bitwise(dtype, tied_model, build_policy, make_batch, tmp_path):
    policy = build_policy(tied_model, dtype=dtype)
    for step in range(3):
        policy.train(make_batch(step))
    save_checkpoint(tmp_path, policy, 3, 7, "L")
    straight = [policy.train(make_batch(step)) for step in range(3, 6)]
    want = weights(policy)

    resumed = build_policy(tied_model, dtype=dtype)
    assert load_checkpoint(tmp_path, resumed) == Progress(step=3, version=7, num_updates=3, lineage="L")
    assert [resumed.train(make_batch(step)) for step in range(3, 6)] == straight
    got = weights(resumed)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_policy_that_never_stepped_can_be_saved_and_resumed(tied_model, build_policy, make_batch, tmp_path):
    policy = build_policy(tied_model)
    save_checkpoint(tmp_path, policy, 0)
    want = policy.train(make_batch())
    resumed = build_policy(tied_model)
    assert load_checkpoint(tmp_path, resumed) == Progress(step=0, version=0, num_updates=0)
    assert resumed.train(make_batch()) == want


def test_only_the_newest_remain_and_latest_names_the_last_and_what_is_half_written_is_not_read(tied_model, build_policy, tmp_path):
    policy = build_policy(tied_model)
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, policy, step, keep=2)
        if step == 1:
            (tmp_path / "step_00000002.part").mkdir()
            assert latest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_00000002", "step_00000003"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000003"


@pytest.mark.parametrize("answers", [[False], [True, False]], ids=["before", "while writing"])
def test_a_trainer_whose_place_was_taken_leaves_the_checkpoint_before_in_place(answers, tied_model, build_policy, tmp_path):
    def confirm():
        if not answers.pop(0):
            raise Fenced("a newer trainer has taken the place of this one")

    policy = build_policy(tied_model)
    save_checkpoint(tmp_path, policy, 1)
    with pytest.raises(Fenced):
        save_checkpoint(tmp_path, policy, 2, confirm=confirm)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000001"
    save_checkpoint(tmp_path, policy, 3)
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000003"


def test_without_a_checkpoint_there_is_nothing_to_resume(tied_model, build_policy, tmp_path):
    assert load_checkpoint(tmp_path, build_policy(tied_model)) is None

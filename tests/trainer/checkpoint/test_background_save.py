"""A checkpoint that is written while training goes on."""

import errno
import logging
import threading
from unittest.mock import Mock

import pytest
import torch

from slimebus.bus.errors import SlimebusError
from trainer.checkpoint import folder
from trainer.checkpoint import save as saving
from trainer.checkpoint.folder import Progress, oldest_step, saved_step
from trainer.checkpoint.load import load_checkpoint
from trainer.checkpoint.save import BackgroundSave
from trainer.checkpoint.schedule import CheckpointSchedule


@pytest.fixture
def slow_disk(monkeypatch):
    """Files are written once it is set."""
    may_write, write = threading.Event(), saving.write_rank_file
    monkeypatch.setattr(saving, "write_rank_file", lambda *args: may_write.wait() and write(*args))
    yield may_write
    may_write.set()


def schedule(run_dir, interval=1):
    config = Mock()
    config.trainer.save_interval, config.trainer.keep_checkpoints, config.trainer.save_hf = interval, 2, ""
    config.rollout.num_rollout = 100
    return CheckpointSchedule(Mock(run_dir=run_dir, config=config))


def test_training_goes_on_while_it_is_written_and_it_holds_the_step_at_which_it_began(
    slow_disk, tied_model, build_policy, make_batch, tmp_path
):
    policy = build_policy(tied_model)
    policy.train(make_batch(0))
    saving = BackgroundSave(tmp_path, policy, Progress(1, 1, policy.num_updates))
    straight = [policy.train(make_batch(step)) for step in (1, 2)]
    assert not saving.is_written()
    assert saved_step(tmp_path) is None
    slow_disk.set()
    saving.finish(keep=2)
    resumed = build_policy(tied_model)
    assert load_checkpoint(tmp_path, resumed) == Progress(1, 1, 1)
    assert [resumed.train(make_batch(step)) for step in (1, 2)] == straight


def test_samples_are_freed_only_under_a_checkpoint_that_is_written(slow_disk, tied_model, build_policy, tmp_path):
    policy, checkpoints = build_policy(tied_model), schedule(tmp_path, interval=2)
    assert [checkpoints.save_if_due(policy, step, step) for step in (1, 2, 3)] == [0, 0, 0]
    slow_disk.set()
    checkpoints._writing._file.result()
    assert checkpoints.save_if_due(policy, 3, 3) == 2


def test_a_stop_waits_for_what_is_being_written_and_saves_the_step_it_is_at(slow_disk, tied_model, build_policy, tmp_path, caplog):
    policy, checkpoints = build_policy(tied_model), schedule(tmp_path, interval=2)
    checkpoints.save_if_due(policy, 2, 2)
    threading.Timer(0.1, slow_disk.set).start()
    with caplog.at_level(logging.INFO):
        checkpoints.save_and_stop(policy, 3, 3)
    assert (oldest_step(tmp_path / "checkpoints"), saved_step(tmp_path / "checkpoints")) == (2, 3)
    assert "stopped before step 3; all steps before it are saved" in caplog.text


def full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")  # a write names no file


def test_a_full_disk_costs_a_checkpoint_and_not_the_run_and_fails_the_last_one(tied_model, build_policy, tmp_path, monkeypatch, caplog):
    policy, checkpoints = build_policy(tied_model), schedule(tmp_path)
    checkpoints.save_if_due(policy, 1, 1)
    checkpoints._writing._file.exception()
    monkeypatch.setattr(saving, "write_rank_file", full)
    checkpoints.save_if_due(policy, 2, 2)
    checkpoints._writing._file.exception()
    assert checkpoints.save_if_due(policy, 3, 3) == 1
    said = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 1
    assert "checkpoint of step 2: rank 0: [Errno 28] No space left on device" in said[0]
    assert f"({tmp_path / 'checkpoints'})" in said[0]
    assert said[0].endswith("the newest checkpoint is still that of step 1")
    with pytest.raises(SlimebusError, match=r"checkpoint of step 4: rank 0: .*No space left"):
        checkpoints.save_and_stop(policy, 4, 4)


@pytest.mark.parametrize("name", ["state.json", "latest"])
def test_a_disk_that_is_full_at_the_end_of_a_save_costs_no_more(name, tied_model, build_policy, tmp_path, monkeypatch, caplog):
    def replacing(path):
        if path.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return written(path)

    policy, checkpoints, written = build_policy(tied_model), schedule(tmp_path), folder.replacing
    checkpoints.save(policy, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "replacing", replacing)
        checkpoints.save_if_due(policy, 2, 2)
        checkpoints._writing._file.result()
        checkpoints.save_if_due(policy, 3, 3)
    assert "checkpoint of step 2: rank 0: [Errno 28] No space left on device" in caplog.text
    assert saved_step(tmp_path / "checkpoints") == checkpoints.saved_step == 1
    checkpoints.save_and_stop(policy, 4, 4)
    assert saved_step(tmp_path / "checkpoints") == 4


def test_a_folder_that_cannot_be_made_costs_a_checkpoint_and_not_the_run(tied_model, build_policy, tmp_path, caplog):
    policy, checkpoints = build_policy(tied_model), schedule(tmp_path)
    (tmp_path / "checkpoints").write_text("in the way")
    checkpoints.save_if_due(policy, 1, 1)
    checkpoints._writing._file.exception()
    (tmp_path / "checkpoints").unlink()
    checkpoints.save_if_due(policy, 2, 2)
    assert "checkpoint of step 1: rank 0: [Errno 20] Not a directory" in caplog.text


def test_a_disk_that_does_not_answer_is_not_waited_for_for_ever(slow_disk, tied_model, build_policy, tmp_path):
    saving = BackgroundSave(tmp_path, build_policy(tied_model), Progress(1, 1, 0))
    with pytest.raises(SlimebusError, match="is not written after 0 s"):
        saving.finish(keep=2, timeout_s=0.01)


# --- Transformer Engine's FusedAdam, whose state differs from torch's: the count of steps is an int in each parameter group ---


class FusedAdam(torch.optim.Optimizer):
    """The state of transformer_engine.pytorch.optimizers.FusedAdam (2.x) with the arithmetic of AdamW, in fp32."""

    def __init__(self, groups):
        super().__init__([dict(group) for group in groups], {"bias_correction": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), count = group["betas"], group["step"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                assert set(state) == {"exp_avg", "exp_avg_sq"}, "what FusedAdam's kernels know"
                state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                divisor = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(state["exp_avg"], divisor, value=-group["lr"] / (1 - beta1**count))


def fuse(policy):
    for part in policy.optimizer.chained_optimizers:
        part.optimizer = FusedAdam(part.optimizer.param_groups)
    return policy


def test_a_run_with_the_fused_adam_of_transformer_engine_resumes_exactly(tied_model, build_policy, make_batch, tmp_path):
    policy = fuse(build_policy(tied_model, dtype="bfloat16"))
    for step in range(3):
        policy.train(make_batch(step))
    BackgroundSave(tmp_path, policy, Progress(3, 3, policy.num_updates)).finish(keep=2)
    straight = [policy.train(make_batch(step)) for step in range(3, 6)]
    for fused, want in ((True, straight), (False, [pytest.approx(metrics, rel=1e-3, abs=1e-6) for metrics in straight])):
        resumed = build_policy(tied_model, dtype="bfloat16")
        assert load_checkpoint(tmp_path, fuse(resumed) if fused else resumed) is not None
        assert [resumed.train(make_batch(step)) for step in range(3, 6)] == want

"""Training on a folder of groups, without a broker."""

import contextlib
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save as torch_bytes
from saved_checkpoint import save_checkpoint

from slimebus.bus.errors import DataError, UsageError
from slimebus.bus.sample_table import check_group
from slimebus.bus.samples import encode_group
from slimebus.client.exported_groups import GROUPS_FILE, arrays_of, shard_name, write_arrays
from slimebus.config import RunConfig
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig, RolloutConfig
from slimebus.telemetry.spans import Spans
from trainer.loop import train
from trainer.main import make_deterministic
from trainer.session.replay import NoPublication, ReplaySource, ReplayStart, random_file
from trainer.watch.step_watch import StepWatch


def export(folder: Path, groups: dict) -> Path:
    """As `slimebus buffer export` writes it."""
    import msgspec

    folder.mkdir(parents=True)
    rows, arrays = [], {}
    for name, group in groups.items():
        checked = check_group(encode_group(group.samples))
        arrays |= arrays_of(name, checked)
        rows.append({"group": name, "prompt": {"prompt": "x"}, "state": "committed", "table": checked.table, "arrays": shard_name(0)})
    rows.append({"group": "unsampled", "prompt": {"prompt": "x"}, "state": "queued"})
    write_arrays(arrays, folder / shard_name(0))
    (folder / GROUPS_FILE).write_bytes(b"\n".join(map(msgspec.json.encode, rows)))
    return folder


@pytest.fixture
def run(tmp_path: Path, make_batch):
    """Eight groups in a folder, and a run of two groups a step."""
    groups = {f"0/{i}": group for i, group in enumerate(make_batch(0, 8))}
    config = RunConfig(rollout=RolloutConfig(rollout_batch_size=2))
    return SimpleNamespace(run_dir=tmp_path, base=tmp_path, config=config, origin={}, folder=export(tmp_path / "groups", groups))


def record(run, rows: list[tuple[int, int, list[str]]], **more: object) -> None:
    (run.run_dir / "metrics").mkdir(exist_ok=True)
    text = "".join(json.dumps({"time": 0, "step": s, "lineage": "L", "version": v, "groups": g, **more}) + "\n" for s, v, g in rows)
    (run.run_dir / "metrics" / "batches.jsonl").write_text(text)


def steps(source: ReplaySource) -> dict[int, list[str]]:
    source.begin(SimpleNamespace(step=0), None, 38)
    return {step: [group.id for group in source.take_batch(step, 0).groups] for step in source.rows}


def test_without_a_record_groups_are_taken_in_order_and_the_log_says_so(run, caplog) -> None:
    assert steps(ReplaySource(run.folder, run)) == {i: [f"0/{2 * i}", f"0/{2 * i + 1}"] for i in range(4)}
    assert f"neither {run.folder} nor {run.run_dir / 'metrics'} has a batches.jsonl" in caplog.text
    assert "as they stand in the folder, 2 a step" in caplog.text


def test_batches_are_those_that_the_run_had_at_last(run) -> None:
    rows = [(3, 3, ["0/9", "0/1"]), (4, 4, ["0/0", "0/7"]), (5, 5, ["0/2"]), (4, 4, ["0/7", "0/3"]), (6, 5, ["0/1"]), (8, 7, ["0/4"])]
    record(run, rows)
    source = ReplaySource(run.folder, run)
    assert steps(source) == {4: ["0/7", "0/3"], 5: ["0/2"], 6: ["0/1"]}, "step 3 lacks a group, and after 6 there is a gap"
    assert [source.take_batch(step, 0).plan([0.1]).publishes for step in (4, 5, 6)] == [True, False, False]


def test_a_replay_begins_where_it_is_told_and_keeps_what_the_one_before_it_wrote(run) -> None:
    source = ReplaySource(run.folder, run, 2)
    assert source.first_step == 2
    assert sorted(source.rows) == [2, 3]
    with pytest.raises(UsageError, match=r"--from-step 4: .* has the groups of steps 0 to 3"):
        ReplaySource(run.folder, run, 4)
    file = run.run_dir / "replay" / "trainer.jsonl"
    file.parent.mkdir(exist_ok=True)
    for number in (1, 2):
        file.write_text(f"{number}\n")
        ReplaySource(run.folder, run)
        assert not file.exists()
    assert [file.with_name(f"trainer-{number}.jsonl").read_text() for number in (1, 2)] == ["1\n", "2\n"]


def test_what_cannot_be_replayed_is_said(run, tmp_path: Path) -> None:
    record(run, [(3, 3, ["0/9"])])
    with pytest.raises(DataError, match=r"of no step in .*batches.jsonl are all groups here"):
        ReplaySource(run.folder, run)
    with pytest.raises(UsageError, match=r"cannot read .*groups.jsonl: No such file"):
        ReplaySource(tmp_path, run)
    with pytest.raises(DataError, match="no group has samples"):
        ReplaySource(export(tmp_path / "none", {}), run)


class NoStop:
    is_made = False

    @staticmethod
    def deferred():
        return contextlib.nullcontext()

    @staticmethod
    def keep_deadline():
        pass


def replay(run, policy, caplog) -> tuple[list[dict], str]:
    """The metrics of each step, and the hash of the weights."""
    caplog.clear()
    source = ReplaySource(run.folder, run)
    watch = StepWatch(run, None, policy, profile=None, is_dumping=False)
    with caplog.at_level(logging.INFO):
        train(policy, source, NoPublication(), ReplayStart(run, run.folder, source), watch, run.config, Spans(), NoStop())
    source.close()
    rows = [json.loads(line) for line in (run.run_dir / "replay" / "trainer.jsonl").read_text().splitlines()]
    (run.run_dir / "replay" / "trainer.jsonl").unlink()
    digest = re.search(r"BLAKE3 of the weights: (\w{64})", caplog.text)
    assert digest, caplog.text
    return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_s") and not k.endswith("_s")} for row in rows], digest[1]


def test_two_replays_are_equal_bit_by_bit_and_begin_with_the_newest_checkpoint_before_them(
    run, tied_model, build_policy, make_batch, caplog, monkeypatch
):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    make_deterministic({"deterministic_mode": True})
    try:
        first = replay(run, build_policy(tied_model), caplog)
        assert [row["step"] for row in first[0]] == [0, 1, 2, 3]
        assert replay(run, build_policy(tied_model), caplog) == first
    finally:
        torch.use_deterministic_algorithms(False)

    policy = build_policy(tied_model)
    save_checkpoint(run.run_dir / "checkpoints", policy, 1)
    record(run, [(2, 2, ["0/0"]), (3, 3, ["0/1"])])
    rows, _ = replay(run, build_policy(tied_model), caplog)
    assert [row["step"] for row in rows] == [2, 3]
    assert "step 2 is replayed with the weights of the checkpoint of step 1: the batches between are not here" in caplog.text


def test_a_step_is_replayed_at_the_learning_rate_that_it_had(run, tied_model, build_policy, caplog):
    """Its weights are those of a checkpoint from long before it, as a dump's are: the schedule would begin anew there."""
    run.config = RunConfig(rollout=RolloutConfig(rollout_batch_size=2, num_rollout=10))
    policy = build_policy(tied_model, optimizer=OptimizerConfig(lr=1e-3, lr_decay_style="linear", lr_decay_iters=10, min_lr=0.0))
    policy.num_updates = 8
    assert policy.learning_rates(2) == pytest.approx([2e-4, 1e-4])
    record(run, [(8, 8, ["0/0"]), (9, 9, ["0/1"])], learning_rates=policy.learning_rates(1))
    policy.num_updates = 0
    rows, _ = replay(run, policy, caplog)
    assert [row["lr"] for row in rows] == pytest.approx([2e-4, 2e-4])
    assert "learning rate" not in caplog.text

    run.origin = {"optimizer.lr": "--lr"}
    assert [row["lr"] for row in replay(run, policy, caplog)[0]] == pytest.approx([8e-4, 7e-4]), "asked for: the schedule goes on"
    assert "those of the options given" in caplog.text

    run.origin = {}
    record(run, [(8, 8, ["0/0"]), (9, 9, ["0/1"])])
    replay(run, policy, caplog)
    assert "no learning rate is recorded of step 8 and 1 more" in caplog.text


@pytest.mark.parametrize("content", [b"", torch_bytes({"torch": torch.get_rng_state()})])
def test_a_damaged_random_state_is_said(run, tied_model, build_policy, content: bytes):
    random_file(run.folder, 0).write_bytes(content)
    source = ReplaySource(run.folder, run)
    with pytest.raises(DataError, match=r"random_00000.safetensors is damaged: .*; remove it"):
        ReplayStart(run, run.folder, source).resume(build_policy(tied_model))
    source.close()


def test_rates_of_another_number_of_optimizer_steps_are_said_not_to_count(run, caplog):
    run.config = RunConfig(rollout=RolloutConfig(rollout_batch_size=2, num_steps_per_rollout=2))
    record(run, [(0, 0, ["0/0", "0/1"]), (1, 1, ["0/2"])], learning_rates=[1e-3])
    with caplog.at_level(logging.WARNING):
        steps(ReplaySource(run.folder, run))
    assert "no learning rate is recorded of step 0 for each optimizer step" in caplog.text, "step 1 has one group, and so one"


def test_steps_beyond_those_of_the_config_are_said_to_be_left_out(run, caplog):
    run.config = RunConfig(rollout=RolloutConfig(rollout_batch_size=2, num_rollout=3))
    with caplog.at_level(logging.INFO):
        assert list(steps(ReplaySource(run.folder, run))) == [0, 1, 2]
    assert "replays steps 0 to 2 of" in caplog.text
    assert "1 later steps are there and not replayed: rollout.num_rollout is 3" in caplog.text
    with pytest.raises(UsageError, match=r"--from-step 3: .* has the groups of steps 0 to 3, and rollout.num_rollout is 3"):
        ReplaySource(run.folder, run, 3)


def test_a_step_without_a_sample_to_train_or_a_field_that_is_read_is_said(run):
    record(run, [(0, 0, [])])
    with pytest.raises(DataError, match=r"step 0 has no sample that can be trained"):
        steps(ReplaySource(run.folder, run))
    record(run, [(0, 0, ["0/0"])])
    run.config = RunConfig(rollout=RolloutConfig(rollout_batch_size=2), algorithm=AlgorithmConfig(advantage_estimator="precomputed"))
    with pytest.raises(DataError, match=r"group 0/0: sample 0: no field 'advantages', which the algorithm reads"):
        steps(ReplaySource(run.folder, run))

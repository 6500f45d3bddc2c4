"""Weights through a shared directory instead of the trainer's weight servers."""

from pathlib import Path

import pytest
from live_run import Run, slow_hook

from slimebus.weights.files import delta_file
from slimebus.weights.files.disk_chain import LATEST, DiskPuller, part_file, read_latest
from slimebus.weights.host.safetensors_file import as_weights, read_model
from slimebus.weights.tensors import rounded

pytestmark = pytest.mark.integration

TWO_STAGES = ("--nproc-per-node", "2", "--pipeline-model-parallel-size", "2")


def test_a_run_of_two_stages_over_a_shared_directory_survives_its_trainer(tmp_path: Path, even_task: Path) -> None:
    shared = tmp_path / "shared"
    hook = slow_hook(tmp_path, 0.3)
    changes = {"weights__weights_dir": str(shared)}
    changes |= {"rollout__num_rollout": 6, "rollout__custom_generate_function_path": hook, "trainer__save_hf": "hf"}
    with Run(tmp_path, even_task, **changes) as run:
        run.start("broker")
        trainer = run.start("trainer", *TWO_STAGES)
        run.start("rollout", name="w1")
        run.wait_for("a checkpoint", lambda s: s["step"] >= 3 and s["oldest_checkpoint"] >= 2)
        trainer.kill()
        run.start("trainer", *TWO_STAGES)
        run.complete(timeout_s=120)
        run.assert_accounted(6)
        lineage = run.final_status()["lineage"]
    (folder,) = [path.parent for path in (shared / "tiny").glob(f"*/{LATEST}")]
    assert folder.name == lineage, "the lineage that was abandoned is still there"
    last = DiskPuller(folder).pull(None, 5.0)
    saved = {name: rounded(tensor) for name, tensor in read_model(run.run_dir / "hf").items()}
    assert (last.version, last.digest) == (6, as_weights(saved).digest)
    latest = read_latest(folder)
    assert latest is not None
    parts = [delta_file.read(folder / part_file(latest.full, part, "full")).payloads.keys() for part in range(latest.parts)]
    assert len(parts) == 2
    assert all(parts), "each stage has written its own"
    assert sum(map(len, parts)) == len(last.tensors)

"""Weights through a shared directory instead of the trainer's weight server."""

from pathlib import Path

import pytest
from live_run import Run, slow_hook

from slimebus.weights.disk_chain import LATEST, DiskPuller

pytestmark = pytest.mark.integration


def test_a_run_over_a_shared_directory_survives_its_trainer(tmp_path: Path, task: Path) -> None:
    shared = tmp_path / "shared"
    hook = slow_hook(tmp_path, 0.3)
    changes = {"weights__weights_transport": "disk", "weights__weights_dir": str(shared), "weights__weights_diff": "device"}
    with Run(tmp_path, task, rollout__num_rollout=10, rollout__custom_generate_function_path=hook, **changes) as run:
        run.start("broker")
        trainer = run.start("trainer")
        run.start("rollout", name="w1")
        run.wait_for("a checkpoint", lambda s: s["step"] >= 3 and s["checkpoint"] >= 2)
        trainer.kill()
        run.start("trainer")
        run.complete(timeout_s=120)
        run.assert_accounted(10)
        lineage = run.final_status()["lineage"]
    (folder,) = [path.parent for path in (shared / "tiny").glob(f"*/{LATEST}")]
    assert folder.name == lineage, "the lineage that was abandoned is still there"
    assert DiskPuller(folder).pull(None, 5.0).version == 10

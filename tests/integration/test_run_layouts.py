"""A trainer of several ranks on the bus."""

import signal
import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from live_run import Run

pytestmark = pytest.mark.integration

TWO_RANKS = ("--nproc-per-node", "2", "--tensor-model-parallel-size", "2")


def test_a_trainer_of_two_tensor_parallel_ranks_completes_a_run(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, rollout__num_rollout=2, trainer__save_hf="hf") as run:
        run.start("broker")
        run.start("rollout", name="w1")
        trainer = run.start("trainer", *TWO_RANKS)
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        assert len(trainer.family()) >= 3, "torchrun and two ranks"
        run.complete()
        run.assert_accounted(num_steps=2)
        assert (run.run_dir / "hf" / "model.safetensors").is_file()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_end_with_their_torchrun(tmp_path: Path, task: Path, number: signal.Signals) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        trainer = run.start("trainer", *TWO_RANKS)
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        family = trainer.family()
        trainer.send(number)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive, f"outlived their torchrun: {[p.cmdline() for p in alive]}"

"""Weights from elsewhere than the trainer: from a neighbour on the host, from another worker, through a shared directory."""

from pathlib import Path
from typing import Any

import pytest
from live_run import Run, clients
from waiting import wait_until

from slimebus.weights.files import delta_file
from slimebus.weights.files.disk_chain import LATEST, DiskPuller, part_file, read_latest
from slimebus.weights.host.safetensors_file import as_weights, read_model
from slimebus.weights.tensors import rounded

pytestmark = pytest.mark.integration


def workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [client for client in clients(status, "rollout") if client.get("version", -1) >= 0]


def metric(status: dict[str, Any], name: str) -> float:
    return float(sum(client["metrics"].get(name, 0) for client in workers(status)))


def test_two_workers_of_a_host_pull_once_and_the_rest_is_shared(tmp_path: Path, task: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    with Run(tmp_path, task, weights__weights_shm=str(shm), slow_s=0.2, rollout__num_rollout=12) as run:
        for role in ("broker", "trainer"):
            run.start(role)
        for name in ("w1", "w2"):
            run.start("rollout", name=name)
        found = run.wait_for("two workers that serve what one pulled", lambda s: len(workers(s)) == 2 and metric(s, "neighbour_bytes") > 0)
        size = sum(file.stat().st_size for file in next(iter(shm.glob("slimebus-weights-*/versions/*"))).glob("*.safetensors"))
        full_pulls = sum(client["metrics"]["pulled_bytes"] > size / 2 for client in workers(found))
        assert full_pulls <= 1, "the whole model went to this host twice"
        run.complete(12)
    assert not list(shm.iterdir()), "all shared memory is given back"


def test_a_worker_killed_in_the_middle_of_a_pull_leaves_its_neighbour_serving(tmp_path: Path, task: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    changes = {"weights__weights_shm": str(shm), "broker__lease_s": 3, "rollout__num_rollout": 12}
    with Run(tmp_path, task, constants={"CLIENT_TIMEOUT_S": 8}, **changes) as run:
        *_, first = run.start_all()
        # it has verified the first tensors, and has the turn
        wait_until("tensor", lambda: list(shm.glob("slimebus-weights-*/tensors/*")), 60, every_s=0.001)
        first.kill()
        run.start("rollout", name="w2")
        run.complete(12)
    assert not list(shm.iterdir()), "what the killed one held is given back too"


def passed_on(status: dict[str, Any]) -> float:
    return sum(c["metrics"].get("passed_on_bytes", 0) for c in clients(status, "rollout"))


def own_memory(folder: Path, name: str) -> str:
    """As on hosts of their own: workers of one host share what one of them pulls."""
    (folder / name).mkdir()
    return str(folder / name)


def test_workers_pass_weights_on_and_one_that_is_killed_is_gone_around(tmp_path: Path, task: Path) -> None:
    changes = {"weights__fanout_bind": "tcp://127.0.0.1:0", "rollout__num_rollout": 16, "broker__lease_s": 3}
    with Run(tmp_path, task, slow_s=0.3, constants={"CLIENT_TIMEOUT_S": 8}, **changes) as run:
        for role in ("broker", "trainer"):
            run.start(role)
        workers = [run.start("rollout", "--weights-shm", own_memory(tmp_path, f"w{i}"), name=f"w{i}") for i in range(3)]
        run.wait_for("weights that were passed on", lambda s: s["step"] >= 3 and passed_on(s) > 0)
        workers[0].kill()
        run.complete(16)
        failures = [c["metrics"].get("pull_failures", 0) for c in run.final_status()["clients"] if c["role"] == "rollout"]
        assert not any(failures), "a worker was left without weights"


TWO_STAGES = ("--nproc-per-node", "2", "--pipeline-model-parallel-size", "2")


def test_a_run_of_two_stages_over_a_shared_directory_survives_its_trainer(tmp_path: Path, even_task: Path) -> None:
    shared = tmp_path / "shared"
    changes = {"weights__weights_dir": str(shared), "rollout__num_rollout": 6, "trainer__save_hf": "hf"}
    with Run(tmp_path, even_task, slow_s=0.3, **changes) as run:
        run.start("broker")
        trainer = run.start("trainer", *TWO_STAGES)
        run.start("rollout", name="w1")
        run.wait_for("a checkpoint", lambda s: s["step"] >= 3 and s["oldest_checkpoint"] >= 2)
        trainer.kill()
        run.start("trainer", *TWO_STAGES)
        run.complete(6)
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

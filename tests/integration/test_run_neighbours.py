"""Two workers of one host: their weights come over the network once, also when one of them is killed."""

from pathlib import Path
from typing import Any

import pytest
from live_run import Run, clients, slow_hook
from waiting import wait_until

pytestmark = pytest.mark.integration


def workers(status: dict[str, Any]) -> list[dict[str, Any]]:
    return [client for client in clients(status, "rollout") if client.get("version", -1) >= 0]


def metric(status: dict[str, Any], name: str) -> float:
    return float(sum(client["metrics"].get(name, 0) for client in workers(status)))


def test_two_workers_of_a_host_pull_once_and_the_rest_is_shared(tmp_path: Path, task: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    hook = slow_hook(tmp_path, 0.2)
    with Run(tmp_path, task, weights__weights_shm=str(shm), rollout__custom_generate_function_path=hook, rollout__num_rollout=12) as run:
        for role in ("broker", "trainer"):
            run.start(role)
        for name in ("w1", "w2"):
            run.start("rollout", name=name)
        found = run.wait_for("two workers that serve what one pulled", lambda s: len(workers(s)) == 2 and metric(s, "neighbour_bytes") > 0)
        size = sum(file.stat().st_size for file in next(iter(shm.glob("slimebus-weights-*/versions/*"))).glob("*.safetensors"))
        full_pulls = sum(client["metrics"]["pulled_bytes"] > size / 2 for client in workers(found))
        assert full_pulls <= 1, "the whole model went to this host twice"
        run.complete(timeout_s=120)
        run.assert_accounted(12)
    assert not list(shm.iterdir()), "all shared memory is given back"


def test_a_worker_killed_in_the_middle_of_a_pull_leaves_its_neighbour_serving(tmp_path: Path, task: Path) -> None:
    shm = tmp_path / "shm"
    shm.mkdir()
    with Run(tmp_path, task, weights__weights_shm=str(shm), broker__lease_s=3, rollout__num_rollout=12) as run:
        *_, first = run.start_all()
        # it has verified the first tensors, and has the turn
        wait_until("tensor", lambda: list(shm.glob("slimebus-weights-*/tensors/*")), 60, every_s=0.001)
        first.kill()
        run.start("rollout", name="w2")
        run.complete(timeout_s=120)
        run.assert_accounted(12)
    assert not list(shm.iterdir()), "what the killed one held is given back too"

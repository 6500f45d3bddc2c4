"""A trainer of several nodes: one command each, without a disk that they share."""

from pathlib import Path

import psutil
import pytest
from live_run import Process, Run

from slimebus.process.launch import free_port

pytestmark = pytest.mark.integration


def ranks_of(launcher: Process) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children()


def test_two_nodes_train_as_one_and_start_again_together_when_a_rank_dies(tmp_path: Path, task: Path) -> None:
    """kill -9 of node 1's rank: both nodes' ranks are ended and started again, and go on from the newest checkpoint."""
    with Run(tmp_path, task, trainer__save_interval=1, rollout__num_rollout=5) as run:
        run.start("broker")
        port = str(free_port())
        nodes = []
        for rank in range(2):
            words = ("--nnodes", "2", "--node-rank", str(rank), "--master-addr", "127.0.0.1", "--master-port", port)
            nodes.append(run.start("trainer", *words, "--max-restarts", "1", name=f"node{rank}"))
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        run.start("rollout", name="w1")
        run.wait_for("a checkpoint", lambda s: s["oldest_checkpoint"] >= 1)
        (victim,) = ranks_of(nodes[1])
        before = {process.pid for node in nodes for process in ranks_of(node)}
        victim.kill()
        run.complete()
        assert len(before) == 2
        run.assert_accounted(num_steps=5)
        assert "node 0 of 2, from --nnodes: starting 1 of 2 ranks" in nodes[0].text()
        assert "the ranks start again from the newest checkpoint (1 of 1)" in nodes[0].text()
        assert "local rank 0 ended with SIGKILL" in nodes[1].text()

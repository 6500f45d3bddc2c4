"""A trainer of several nodes: one command each, without a disk that they share."""

import re
import signal
from pathlib import Path

import psutil
import pytest
from live_run import Process, Run

from slimebus.process.launch import free_port

pytestmark = pytest.mark.integration

FAILING = """
from trainer.algorithms import grpo


class Failing(grpo.Grpo):
    def advantages(self, batch):
        raise ValueError("no advantages today")
"""
FAILED = "a rank failed, so all are ended: "


def ranks_of(launcher: Process) -> list[psutil.Process]:
    return psutil.Process(launcher.pid).children()


def start_nodes(run: Run, *flags: str) -> list[Process]:
    """Node 0 and node 1, with one rank each."""
    where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()), *flags)
    return [run.start("trainer", *where, "--node-rank", str(rank), name=f"node{rank}") for rank in range(2)]


def failures(node: Process) -> list[str]:
    """What this node says has ended all ranks."""
    return [line.rpartition(FAILED)[2] for line in node.text().splitlines() if FAILED in line]


def test_two_nodes_train_as_one_and_start_again_together_when_a_rank_dies(tmp_path: Path, task: Path) -> None:
    """kill -9 of node 1's rank: both nodes' ranks are ended and restarted, and go on from the newest checkpoint."""
    with Run(tmp_path, task, trainer__save_interval=1, rollout__num_rollout=5) as run:
        run.start("broker")
        nodes = start_nodes(run, "--max-restarts", "1")
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
        for node in nodes:
            (failure,) = failures(node)
            assert re.fullmatch(r"rank 1 on \S+ ended with SIGKILL", failure)
            assert "Traceback" not in node.text(), "rank 0's, which misses rank 1"


def test_an_error_on_one_node_is_named_on_all_and_not_tried_again(tmp_path: Path, task: Path) -> None:
    (tmp_path / "own.py").write_text(FAILING)
    with Run(tmp_path, task) as run:
        run.start("broker")
        run.start("rollout", name="w1")
        nodes = start_nodes(run, "--max-restarts", "1", "--advantage-estimator", "own.py:Failing")
        for node in nodes:
            node.expected.add(2)
        assert [node.wait() for node in nodes] == [2, 2]
        for node in nodes:
            (failure,) = failures(node)
            assert re.fullmatch(r"rank 0 on \S+ ended with exit code 2: HookError: .*own.py:7: ValueError: no advantages today", failure)
        assert "start again" not in nodes[0].text()


@pytest.mark.parametrize(
    ("killed", "code", "text"), [(0, 1, "node 0 is gone, so the ranks here are ended"), (1, 70, "node 1 (127.0.0.1) is gone")]
)
def test_a_launcher_that_is_killed_ends_the_ranks_of_both_nodes(tmp_path: Path, task: Path, killed: int, code: int, text: str) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        nodes = start_nodes(run, "--max-restarts", "1")
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        ranks = [rank for launcher in nodes for rank in ranks_of(launcher)]
        other = nodes[1 - killed]
        other.expected.add(code)
        nodes[killed].kill()
        assert other.wait() == code
        assert not psutil.wait_procs(ranks, timeout=30)[1]
        assert text in other.text()


@pytest.mark.parametrize("asked", [[0], [1], [0, 1]])
def test_sigterm_to_any_node_saves_and_ends_all(tmp_path: Path, task: Path, asked: list[int]) -> None:
    with Run(tmp_path, task, trainer__save_interval=1000, rollout__num_rollout=1000) as run:
        run.start("broker")
        nodes = start_nodes(run, "--max-restarts", "1")
        run.start("rollout", name="w1")
        run.wait_for("a step", lambda s: s["step"] >= 2)
        for node in asked:
            nodes[node].send(signal.SIGTERM)
        assert [node.wait() for node in nodes] == [0, 0]
        assert (run.run_dir / "checkpoints" / "latest").is_file()
        assert not any(failures(node) for node in nodes)

"""A trainer of several ranks on the bus, on one node and on several that share no disk."""

import re
import signal
from pathlib import Path

import psutil
import pytest
from live_run import Process, Run

from slimebus.bus.transport.client import Client
from slimebus.process.launch import free_port
from slimebus.security import key_folder
from slimebus.security.credentials import Credentials
from slimebus.security.key_file import read_key
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import rounded

pytestmark = pytest.mark.integration

FAILING = """
from trainer.algorithms import grpo


class Failing(grpo.Grpo):
    def advantages(self, batch):
        raise ValueError("no advantages today")
"""
TWO_RANKS = ("--nproc-per-node", "2", "--tensor-model-parallel-size", "2")
TWO_STAGES = ("--nproc-per-node", "2", "--pipeline-model-parallel-size", "2")


def publishers(run: Run) -> list[str]:
    """The addresses that a worker gets when it joins now."""
    client = Client(run.address, name="looker", credentials=Credentials(run.keys / "client.key") if run.keys else None)
    try:
        return client.join("client", timeout_s=10).publishers
    finally:
        client.close()


def test_a_trainer_of_two_tensor_parallel_ranks_completes_a_run(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, rollout__num_rollout=2, trainer__save_hf="hf") as run:
        run.start("broker")
        run.start("rollout", name="w1")
        trainer = run.start("trainer", *TWO_RANKS)
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        assert len(trainer.family()) >= 3, "the launcher and two ranks"
        run.complete(2)
        assert (run.run_dir / "hf" / "model.safetensors").is_file()


def test_each_pipeline_stage_serves_its_own_tensors_and_workers_put_them_together(tmp_path: Path, even_task: Path) -> None:
    """The first version is the model on disk, bit for bit, and has the digest that one publisher would give it."""
    model = {name: rounded(tensor) for name, tensor in read_model(even_task / "model").items()}
    with Run(tmp_path, even_task, rollout__num_rollout=3, trainer__save_interval=1) as run:
        run.start("broker")
        trainer = run.start("trainer", *TWO_STAGES)
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        addresses = publishers(run)
        assert len(addresses) == 2
        puller, halves = WeightPuller(addresses), [WeightPuller([address]) for address in addresses]
        got, parts = puller.pull(deadline_s=20), [half.pull(deadline_s=20).tensors for half in halves]
        for one in (puller, *halves):
            one.close()
        assert got.digest == VersionStore().publish(model).digest
        assert all((got.tensors[name].buffer == tensor.buffer).all() for name, tensor in model.items())
        assert all(parts), "each stage has some"
        assert sum(map(len, parts)) == len(model), "none has what another has"
        run.start("rollout", name="w1")
        run.complete(3)
        rows = run.rows("trainer")
        assert rows[-1]["weights_total_bytes"] == sum(len(tensor.buffer) for tensor in model.values())
        assert "part 2 of 2" in trainer.text()


def test_a_publishing_rank_that_dies_ends_its_trainer_and_the_next_one_goes_on(tmp_path: Path, even_task: Path) -> None:
    """With keys: the second stage learns from the broker which keys to accept."""
    keys = tmp_path / "keys"
    key_folder.init(keys)
    with Run(tmp_path, even_task, rollout__num_rollout=4, trainer__save_interval=1, security__keys=str(keys)) as run:
        run.keys = keys
        run.start("broker")
        trainer = run.start("trainer", *TWO_STAGES)
        run.start("rollout", name="w1")
        lineage = run.wait_for("a checkpoint", lambda s: s["oldest_checkpoint"] >= 1)["lineage"]
        puller = WeightPuller(publishers(run), pair=read_key(keys / "rollout.key").pair)
        assert puller.pull(deadline_s=20).lineage == lineage
        puller.close()
        (second,) = [p for p in trainer.family() if p.environ().get("RANK") == "1" and p.ppid() == trainer.pid]
        trainer.expected.add(1)
        second.kill()
        assert trainer.wait() == 1
        assert run.status()["lineage"] == lineage, "workers keep what they have"
        run.start("trainer", *TWO_STAGES)
        run.wait_for("a new lineage", lambda s: s["lineage"] != lineage and s["version"] >= 1)
        run.complete(4)


def test_a_plug_in_that_fails_on_rank_0_ends_all_ranks_and_is_said_once(tmp_path: Path, task: Path) -> None:
    """The others would wait for rank 0, or say only that it is gone."""
    (tmp_path / "own.py").write_text(FAILING)
    with Run(tmp_path, task) as run:
        run.start("broker")
        run.start("rollout", name="w1")
        trainer = run.start("trainer", *TWO_RANKS, "--advantage-estimator", "own.py:Failing")
        trainer.ends(2)
        assert trainer.text().count("slimebus: ") == 1, trainer.text()
        assert trainer.text().count(f"own.py:{FAILING.count(chr(10))}: ValueError: no advantages today") == 2, (
            "the rank's, and the launcher's"
        )
        assert "Traceback" not in trainer.text()
        assert "a rank failed, so all are ended: rank 0 on " in trainer.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_ranks_end_with_their_launcher(tmp_path: Path, task: Path, number: signal.Signals) -> None:
    with Run(tmp_path, task) as run:
        run.start("broker")
        trainer = run.start("trainer", *TWO_RANKS)
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        family = trainer.family()
        trainer.send(number)
        _, alive = psutil.wait_procs(family, timeout=30)  # SIGTERM saves within 25 s
        assert not alive, f"outlived their launcher: {[p.cmdline() for p in alive]}"


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
    """kill -9 of node 1's rank: both nodes' ranks are ended and started again, and go on from the newest checkpoint."""
    with Run(tmp_path, task, trainer__save_interval=1, rollout__num_rollout=5) as run:
        run.start("broker")
        nodes = start_nodes(run, "--max-restarts", "1")
        run.wait_for("a publishing trainer", lambda s: s["version"] >= 0)
        run.start("rollout", name="w1")
        run.wait_for("a checkpoint", lambda s: s["oldest_checkpoint"] >= 1)
        (victim,) = ranks_of(nodes[1])
        before = {process.pid for node in nodes for process in ranks_of(node)}
        victim.kill()
        run.complete(5)
        assert len(before) == 2
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

"""A stateful source in a real broker that is killed while it samples and trains."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from raw_cast import begin, put, sample

from broker.store import open_store
from slimebus.launch import free_port
from slimebus.messages import Batch, BatchReply, Commit, GiveBack, Lease, LeaseReply, Publish
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration

SOURCE = """
class Counting:
    def __init__(self):
        self.given, self.told = 0, []

    def take(self):
        self.given += 1
        return {"prompt": f"p{self.given}", "metadata": {"n": self.given}}

    def feedback(self, result):
        self.told.append([result.id, result.attempt, result.outcome, result.metadata["n"], result.rewards])

    def save(self):
        return {"given": self.given, "told": self.told}

    def load(self, state):
        vars(self).update(state)
"""
STEPS, BATCH = 45, 4


def _start(file: Path) -> "subprocess.Popen[bytes]":
    log = (file.parent / "broker.log").open("ab")
    with log:
        return subprocess.Popen([sys.executable, "-m", "slimebus", "broker", str(file)], stdout=log, stderr=log)


def _work(worker: Client, version: int, prompts: list[str]) -> int:
    """Lease once; drop the prompts whose number ends in 7, put the others. The number put."""
    reply = worker.call(Lease(want=2, wait_s=1.0, lineage="L", serving=version), timeout_s=60)
    assert isinstance(reply.message, LeaseReply)
    done = 0
    for group, record in zip(reply.message.groups, reply.bulk, strict=True):
        prompts.append(msgspec.msgpack.decode(record)["prompt"])
        if prompts[-1].endswith("7"):
            back = GiveBack(group=group.group, lease=group.lease, outcome="drop", reason="filtered", rewards=[1.0])
            worker.call(back, timeout_s=60)
            continue
        put(worker, group, [msgspec.structs.replace(sample(version), reward=0.5)])
        done += 1
    return done


def _train(trainer: Client, worker: Client, prompts: list[str]) -> list[str]:
    trained: list[str] = []
    for step in range(STEPS):
        groups: list[str] = []
        while not groups:
            _work(worker, step, prompts)
            reply = trainer.call(Batch(step=step, wait_s=0.0), timeout_s=60).message
            assert isinstance(reply, BatchReply)
            groups = [group.group for group in reply.groups]
        trainer.call(Publish(lineage="L", version=step + 1, publishers=["tcp://t"]), timeout_s=60)
        trainer.call(Commit(step=step, checkpoint=step), timeout_s=60)
        trained += groups
    return trained


def test_a_killed_broker_neither_loses_nor_repeats_a_prompt_or_its_feedback(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    (tmp_path / "source.py").write_text(SOURCE)
    config: dict[str, Any] = {
        "name": "hooked",
        "run_dir": str(tmp_path / "run"),
        "broker": {"bind": address, "durability": "os", "max_staleness": 1},
        "data": {"source_path": "source.py:Counting"},
        "rollout": {"rollout_batch_size": BATCH, "n_samples_per_prompt": 1, "num_rollout": 1000},
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(config))
    process = _start(file)
    trainer, worker = (Client(address, name=name, resend_s=0.3) for name in ("t", "w"))
    try:
        trainer.join("trainer", timeout_s=30)
        worker.join("rollout", timeout_s=30)
        begin(trainer)
        prompts: list[str] = []
        trained: list[str] = []
        thread = threading.Thread(target=lambda: trained.extend(_train(trainer, worker, prompts)))
        thread.start()
        for number in (10, 47, 95, 150):
            until = time.monotonic() + 30
            while len(prompts) < number and time.monotonic() < until:
                time.sleep(0.002)
            process.kill()
            process.wait(10)
            process = _start(file)
        thread.join(60)
        assert not thread.is_alive()
    finally:
        worker.close(goodbye=False)
        trainer.close(goodbye=False)
        process.terminate()
        process.wait(20)
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert len(prompts) == len(set(prompts)), "no prompt was given twice"
    store = open_store("os", tmp_path / "run" / "broker")
    state = msgspec.msgpack.decode(store.get("source", "state") or b"")
    store.close()
    assert state["given"] == len(prompts)
    told = state["told"]
    assert [t[0] for t in told if t[2] == "trained"] == trained
    assert {t[0] for t in told if t[2] == "dropped"} == {f"hook/{int(p[1:]) - 1}" for p in prompts if p.endswith("7")}
    assert all(t[3] == int(t[0].partition("/")[2]) + 1 and t[4] == [1.0 if t[2] == "dropped" else 0.5] for t in told)
    assert len(told) == len({t[0] for t in told})

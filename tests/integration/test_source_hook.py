"""A stateful source in a real broker that is killed while it samples and trains."""

import threading
from pathlib import Path

import msgspec
import pytest
from live_broker import LiveBroker
from made_samples import made
from scripted import begin, publish, put, take
from waiting import wait_until

from broker.store import open_store
from slimebus.bus.messages import Commit, GiveBack, Lease, LeaseReply
from slimebus.bus.transport.client import Client

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
STEPS, BATCH, SAMPLES = 45, 4, 2


def _work(worker: Client, version: int, prompts: list[str]) -> int:
    """Lease once; drop the prompts with a number that ends in 7, put the others. The number put."""
    reply = worker.call(Lease(want=2, wait_s=1.0, lineage="L", serving=version), timeout_s=60)
    assert isinstance(reply.message, LeaseReply)
    done = 0
    for group, record in zip(reply.message.groups, reply.bulk, strict=True):
        prompts.append(msgspec.msgpack.decode(record)["prompt"])
        if prompts[-1].endswith("7"):
            back = GiveBack(group=group.group, lease=group.lease, outcome="drop", reason="filtered", rewards=[1.0])
            worker.call(back, timeout_s=60)
            continue
        put(worker, group, [made((version, 5), reward=0.5)] * SAMPLES)
        done += 1
    return done


def _train(trainer: Client, worker: Client, prompts: list[str]) -> list[str]:
    trained: list[str] = []
    for step in range(STEPS):
        groups: list[str] = []
        while not groups:
            _work(worker, step, prompts)
            groups = [group.group for group in take(trainer, step, wait_s=0.0).groups]
        publish(trainer, step + 1)
        trainer.call(Commit(step=step, checkpoint=step), timeout_s=60)
        trained += groups
    return trained


def test_a_killed_broker_neither_loses_nor_repeats_a_prompt_or_its_feedback(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(SOURCE)
    rollout = {"rollout_batch_size": BATCH, "n_samples_per_prompt": SAMPLES, "num_rollout": 1000}
    with LiveBroker(tmp_path, data={"source_path": "source.py:Counting"}, rollout=rollout) as broker:
        trainer, worker = (broker.client(name, role, resend_s=0.3) for name, role in (("t", "trainer"), ("w", "rollout")))
        begin(trainer)
        prompts: list[str] = []
        trained: list[str] = []
        thread = threading.Thread(target=lambda: trained.extend(_train(trainer, worker, prompts)))
        thread.start()
        for number in (10, 47, 95, 150):
            wait_until(f"{number} prompts", lambda number=number: len(prompts) >= number, every_s=0.002)
            broker.kill()
            broker.start()
        thread.join(60)
        assert not thread.is_alive()
        broker.process.terminate()
        broker.process.wait(20)
    assert len(trained) == len(set(trained)) == STEPS * BATCH
    assert len(prompts) == len(set(prompts)), "no prompt was given twice"
    store = open_store("os", tmp_path / "run" / "broker")
    state = msgspec.msgpack.decode(store.get("source", "state") or b"")
    store.close()
    assert state["given"] == len(prompts)
    told = state["told"]
    assert [t[0] for t in told if t[2] == "trained"] == trained
    assert {t[0] for t in told if t[2] == "dropped"} == {f"hook/{int(p[1:]) - 1}" for p in prompts if p.endswith("7")}
    assert all(t[3] == int(t[0].partition("/")[2]) + 1 and t[4] == ([1.0] if t[2] == "dropped" else [0.5] * SAMPLES) for t in told)
    assert len(told) == len({t[0] for t in told})


def test_a_broker_whose_source_does_not_return_names_its_line_ends_at_sigterm_and_goes_on_when_started_again(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(SOURCE.replace("        self.given += 1", "        time.sleep(1e6 * (self.given == 2))\n        self.given += 1", 1))
    source.write_text("import time\n" + source.read_text())
    rollout = {"rollout_batch_size": BATCH, "n_samples_per_prompt": SAMPLES, "num_rollout": 1000}
    with LiveBroker(tmp_path, data={"source_path": "source.py:Counting"}, rollout=rollout) as broker:
        trainer, worker = (broker.client(name, role, resend_s=0.3) for name, role in (("t", "trainer"), ("w", "rollout")))
        begin(trainer)
        first = worker.call(Lease(want=2, wait_s=0.0, lineage="L", serving=0), timeout_s=60).message
        assert isinstance(first, LeaseReply)
        assert len(first.groups) == 2
        asked = worker.submit(Lease(want=1, wait_s=1.0, lineage="L", serving=0), timeout_s=200)
        line = f"the broker's loop has been blocked for 5 s at {source}:"
        wait_until("a line of the log", lambda: line in broker.log.read_text())
        broker.process.terminate()
        assert broker.process.wait(40) == 1
        assert "time.sleep" in broker.log.read_text(), "the stack"
        source.write_text(SOURCE)
        broker.start()
        third = asked.result(200).message
        assert isinstance(third, LeaseReply)
        assert len(third.groups) == 1
        assert third.groups[0].group not in {group.group for group in first.groups}

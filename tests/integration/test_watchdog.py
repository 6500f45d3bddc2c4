"""A live run that stops moving: `slimebus status` names who it waits for and ends with the code for it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from raw_cast import begin, train

from slimebus.commands.status import ask_status
from slimebus.launch import free_port
from slimebus.messages import Batch, Heartbeat
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
WORKER = """
import sys, time
import numpy as np
from slimebus.messages import Heartbeat, Lease, Put
from slimebus.samples import Sample, encode_group
from slimebus.transport.client import Client
client = Client(sys.argv[1], name="w2")
welcome = client.join("rollout", timeout_s=30)
seen, held = {"lineage": "", "version": -1}, []
def hear(reply):
    seen.update(lineage=reply.lineage, version=reply.version)
def beat():
    return Heartbeat(state="serving", lineage=seen["lineage"], serving=seen["version"], leases=list(held))
client.keep_alive(0.2, beat, hear, lambda problem: None)
sample = lambda v: Sample(tokens=np.zeros(4, np.int32), loss_mask=np.ones(4, np.uint8), rollout_logprobs=np.zeros(4, np.float32),
                          versions=[(v, 4)], reward=1.0)
while True:
    reply = client.call(Lease(want=4, wait_s=5, lineage=seen["lineage"], serving=seen["version"]), timeout_s=60).message
    held = [g.lease for g in reply.groups]
    for g in reply.groups:
        time.sleep(0.1)
        headers, fields, frames = encode_group([sample(seen["version"])] * g.num_samples)
        client.call(Put(group=g.group, lease=g.lease, attempt=g.attempt, lineage=seen["lineage"], samples=headers, fields=fields), frames)
"""


class Processes:
    """A broker and a worker; whatever happens they are gone at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"tcp://127.0.0.1:{free_port()}"
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(400)))
        config = {
            "name": "watched",
            "run_dir": str(folder / "run"),
            "broker": {"bind": self.address, "durability": "os", "heartbeat_s": 0.2, "lease_s": 60, "stall_min_s": 1.0, "max_staleness": 2},
            "data": {"prompt_data": [str(folder / "prompts.jsonl")]},
            "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 50},
        }
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        self.log = (folder / "broker.log").open("wb")
        self.broker = self.start(["-m", "slimebus", "broker", str(folder / "run.yaml")])
        self.worker = self.start(["-c", WORKER, self.address])

    def start(self, command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, *command], stdout=self.log, stderr=self.log, cwd=ROOT)

    def status(self, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "slimebus", "status", "--broker", self.address, "--timeout-s", "10", *flags]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)

    def close(self) -> None:
        for process in (self.worker, self.broker):
            process.kill()
            process.wait(10)
        self.log.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    running = Processes(tmp_path)
    yield running
    running.close()


def test_status_names_a_stopped_worker_and_ends_with_3(processes: Processes) -> None:
    trainer = Client(processes.address, name="t")
    trainer.join("trainer", timeout_s=60)
    trainer.keep_alive(0.2, lambda: Heartbeat(state="training"), lambda reply: None, lambda problem: None)
    begin(trainer)
    for step in range(6):
        train(trainer, step)
    well = processes.status()
    assert (well.returncode, "stalled for" in well.stdout) == (0, False), well

    step, deadline = 7, time.monotonic() + 60
    train(trainer, 6)  # the worker may have gone as far ahead as it may: now it goes on
    while not ask_status(trainer, 10.0)["groups"]["leased"]:
        assert time.monotonic() < deadline
    os.kill(processes.worker.pid, signal.SIGSTOP)
    while trainer.call(Batch(step=step, wait_s=0.5)).message.groups:  # what was ready when the worker stopped
        train(trainer, step)
        step += 1
    waiting = trainer.submit(Batch(step=step, wait_s=60), timeout_s=90)
    while (found := processes.status()).returncode == 0 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert found.returncode == 3, found
    assert f"trainer waits for batch {step}" in found.stdout.splitlines()[0]
    assert "leased by w2, silent for" in found.stdout.splitlines()[0]
    as_json = processes.status("--json")
    assert as_json.returncode == 3
    assert (json.loads(as_json.stdout)["stalled"]["role"], json.loads(as_json.stdout)["stalled"]["who"]) == ("rollout", ["w2"])

    os.kill(processes.worker.pid, signal.SIGCONT)
    waiting.result(60)
    train(trainer, step)
    assert processes.status().returncode == 0
    log = (processes.folder / "broker.log").read_text()
    assert 1 <= log.count("WARNING: stalled for") == log.count("no longer stalled")
    trainer.close()


def test_status_ends_with_4_when_no_broker_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "slimebus", "status", "--broker", f"tcp://127.0.0.1:{free_port()}", "--timeout-s", "0.5"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert found.returncode == 4
    assert "no answer from the broker" in found.stderr

"""A live run that stops moving: `slimebus status` names who it waits for and ends with the code for it."""

import json
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from live_broker import LiveBroker
from scripted import beat, begin, take, train
from slimebus_command import slimebus
from waiting import wait_until

from slimebus.bus.messages import Batch
from slimebus.bus.transport.client import Client
from slimebus.view.run_status import ask_status

pytestmark = pytest.mark.integration

WORKER = """
import sys, time
from made_samples import made
from scripted import lease, put
from slimebus.bus.messages import Heartbeat
from slimebus.bus.transport.client import Client
client = Client(sys.argv[1], name="w2")
client.join("rollout", timeout_s=30)
seen, held = {"lineage": "", "version": -1}, []
def hear(reply):
    seen.update(lineage=reply.lineage, version=reply.version)
def beat():
    return Heartbeat(state="serving", lineage=seen["lineage"], serving=seen["version"], leases=list(held))
client.keep_alive(0.2, beat, hear, lambda problem: None)
while True:
    groups = lease(client, 4, version=seen["version"], wait_s=5)
    held = [g.lease for g in groups]
    for g in groups:
        time.sleep(0.1)
        put(client, g, [made((seen["version"], 4))] * g.num_samples)
"""

TRIES = 4


def slimebus_beside_training(trainer: Client, step: int, *words: str) -> tuple[subprocess.CompletedProcess[str], int]:
    """What a command says of a run that goes on, and the step to train next: six or more, until the command has ended."""
    with ThreadPoolExecutor(1) as pool:
        asked, end = pool.submit(slimebus, *words), step + 6
        while step < end or not asked.done():
            train(trainer, step)
            step += 1
    return asked.result(), step


def test_status_names_a_stopped_worker_and_ends_with_3(tmp_path: Path) -> None:
    times = {"heartbeat_s": 0.2, "lease_s": 60, "stall_min_s": 1.0, "max_staleness": 2}
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 500}
    with LiveBroker(tmp_path, num_prompts=4000, broker=times, rollout=rollout) as broker:
        worker = broker.start_beside("-c", WORKER, broker.address)
        command = ("status", "--broker", broker.address, "--timeout-s", "10")
        trainer = beat(broker.client("t", "trainer"), 0.2, state="training")
        begin(trainer)
        well, step = slimebus_beside_training(trainer, 0, *command)
        assert (well.returncode, "stalled for" in well.stdout) == (0, False), well

        train(trainer, step)  # the worker may have gone as far ahead as it may: now it goes on
        wait_until("lease", lambda: ask_status(trainer, 10.0)["groups"]["leased"], every_s=0)
        worker.send_signal(signal.SIGSTOP)
        step += 1
        while take(trainer, step, wait_s=0.5).groups:  # what was ready when the worker stopped
            train(trainer, step)
            step += 1
        waiting = trainer.submit(Batch(step=step, wait_s=500), timeout_s=530)
        wait_until("stall", lambda: slimebus(*command).returncode, every_s=0.2)
        found = slimebus(*command)
        assert found.returncode == 3, found
        assert f"trainer waits for batch {step}" in found.stdout.splitlines()[0]
        assert "leased by w2, silent for" in found.stdout.splitlines()[0]
        as_json = slimebus(*command, "--json")
        assert as_json.returncode == 3
        stalled = json.loads(as_json.stdout)["stalled"]
        assert (stalled["role"], stalled["who"]) == ("rollout", ["w2"])

        worker.send_signal(signal.SIGCONT)
        waiting.result(120)
        for _ in range(TRIES):  # a busy machine may stand still for the second that is a stall here
            well, step = slimebus_beside_training(trainer, step, *command)
            if well.returncode == 0:
                break
        assert well.returncode == 0, (step, well)
        log = broker.log.read_text()
        assert 1 <= log.count("WARNING: stalled for") == log.count("no longer stalled")

"""A live run that stops moving: `slimebus status` names who it waits for and ends with the code for it."""

import json
import signal
from pathlib import Path

import pytest
from live_broker import LiveBroker
from raw_cast import begin, train
from slimebus_command import slimebus
from waiting import wait_until

from slimebus.commands.status import ask_status
from slimebus.launch import free_port
from slimebus.messages import Batch, Heartbeat

pytestmark = pytest.mark.integration

WORKER = """
import sys, time
from raw_cast import put, sample
from slimebus.messages import Heartbeat, Lease
from slimebus.transport.client import Client
client = Client(sys.argv[1], name="w2")
client.join("rollout", timeout_s=30)
seen, held = {"lineage": "", "version": -1}, []
def hear(reply):
    seen.update(lineage=reply.lineage, version=reply.version)
def beat():
    return Heartbeat(state="serving", lineage=seen["lineage"], serving=seen["version"], leases=list(held))
client.keep_alive(0.2, beat, hear, lambda problem: None)
while True:
    reply = client.call(Lease(want=4, wait_s=5, lineage=seen["lineage"], serving=seen["version"]), timeout_s=60).message
    held = [g.lease for g in reply.groups]
    for g in reply.groups:
        time.sleep(0.1)
        put(client, g, [sample(seen["version"], 4)] * g.num_samples)
"""


def test_status_names_a_stopped_worker_and_ends_with_3(tmp_path: Path) -> None:
    times = {"heartbeat_s": 0.2, "lease_s": 60, "stall_min_s": 1.0, "max_staleness": 2}
    rollout = {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "num_rollout": 50}
    with LiveBroker(tmp_path, num_prompts=400, broker=times, rollout=rollout) as broker:
        worker = broker.start_beside("-c", WORKER, broker.address)
        command = ("status", "--broker", broker.address, "--timeout-s", "10")
        trainer = broker.client("t", "trainer")
        trainer.keep_alive(0.2, lambda: Heartbeat(state="training"), lambda reply: None, lambda problem: None)
        begin(trainer)
        for step in range(6):
            train(trainer, step)
        well = slimebus(*command)
        assert (well.returncode, "stalled for" in well.stdout) == (0, False), well

        train(trainer, 6)  # the worker may have gone as far ahead as it may: now it goes on
        wait_until("lease", lambda: ask_status(trainer, 10.0)["groups"]["leased"], every_s=0)
        worker.send_signal(signal.SIGSTOP)
        step = 7
        while trainer.call(Batch(step=step, wait_s=0.5)).message.groups:  # what was ready when the worker stopped
            train(trainer, step)
            step += 1
        waiting = trainer.submit(Batch(step=step, wait_s=60), timeout_s=90)
        wait_until("stall", lambda: slimebus(*command).returncode, 60, every_s=0.2)
        found = slimebus(*command)
        assert found.returncode == 3, found
        assert f"trainer waits for batch {step}" in found.stdout.splitlines()[0]
        assert "leased by w2, silent for" in found.stdout.splitlines()[0]
        as_json = slimebus(*command, "--json")
        assert as_json.returncode == 3
        stalled = json.loads(as_json.stdout)["stalled"]
        assert (stalled["role"], stalled["who"]) == ("rollout", ["w2"])

        worker.send_signal(signal.SIGCONT)
        waiting.result(60)
        train(trainer, step)
        assert slimebus(*command).returncode == 0
        log = broker.log.read_text()
        assert 1 <= log.count("WARNING: stalled for") == log.count("no longer stalled")


def test_status_ends_with_4_when_no_broker_answers() -> None:
    found = slimebus("status", "--broker", f"tcp://127.0.0.1:{free_port()}", "--timeout-s", "0.5")
    assert found.returncode == 4
    assert "no answer from the broker" in found.stderr

"""A broker process with real clients around it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from raw_cast import LINEAGE, begin, put, sample, train

from slimebus.errors import Fenced, SlimebusError
from slimebus.launch import free_port
from slimebus.messages import (
    Finish,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    Resume,
    Status,
)
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration

BROKER = """
import logging, signal, sys, threading
from pathlib import Path
from broker.shell import Broker
from broker.source import FileRows, FileSource
from broker.state.rules import Rules
from broker.store import open_store
run_dir, bind, durability = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
logging.basicConfig(level="INFO")
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
rules = Rules(batch_size=2, samples_per_prompt=2, max_staleness=1, num_steps=6, lease_s=4, heartbeat_s=0.2, client_timeout_s=5)
source = FileSource(FileRows([str(run_dir / "prompts.jsonl")]), seed=1)
broker = Broker(rules, source, open_store(durability, run_dir / "broker"), run="test", bind=bind,
                metrics_path=run_dir / "metrics" / "broker.jsonl")
print(broker.endpoint, flush=True)
broker.run(stop)
"""


class Process:
    """A broker that can be killed and started again on the same address."""

    def __init__(self, run_dir: Path, durability: str = "os") -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.run_dir, self.durability = run_dir, durability
        lines = (json.dumps({"prompt": f"p{i}", "label": i}) + "\n" for i in range(20))
        (run_dir / "prompts.jsonl").write_text("".join(lines))
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", BROKER, str(self.run_dir), self.address, self.durability]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == self.address

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def stop(self) -> float:
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return time.monotonic() - started


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    yield process
    process.kill()


def _client(broker: Process, name: str, role: str) -> Client:
    client = Client(broker.address, name=name, peer="broker", resend_s=0.5)
    client.join(role, timeout_s=10)
    return client


def _put_one(worker: Client, version: int) -> str:
    """Lease one group and put its samples; its id, or nothing when none was to be had."""
    reply = worker.call(Lease(want=1, wait_s=5.0, lineage=LINEAGE, serving=version), timeout_s=15).expect(LeaseReply)
    for group in reply.groups:
        done = put(worker, group, [sample(version)] * group.num_samples)
        assert done.result in ("accepted", "duplicate"), done
        return group.group
    return ""


def _status(client: Client) -> dict[str, object]:
    return json.loads(bytes(client.call(Status()).bulk[0]))


def _begin(broker: Process) -> tuple[Client, Client]:
    trainer, worker = _client(broker, "t", "trainer"), _client(broker, "w", "rollout")
    begin(trainer)
    return trainer, worker


def test_a_worker_and_a_trainer_finish_a_run_and_the_broker_leaves_with_them(broker: Process, tmp_path: Path) -> None:
    trainer, worker = _begin(broker)
    trained = []
    for step in range(6):
        for _ in range(2):
            assert _put_one(worker, step)
        groups = train(trainer, step)
        assert [len(samples) for samples in groups.values()] == [2, 2]
        trained += groups
    assert len(set(trained)) == 12
    trainer.call(Finish())
    beat = worker.call(Heartbeat(lineage=LINEAGE, serving=5)).message
    assert isinstance(beat, HeartbeatReply)
    assert beat.finished
    worker.close()
    trainer.close()
    assert broker.process.wait(5) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics" / "broker.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))


def test_a_broker_killed_between_put_and_reply_loses_nothing(broker: Process) -> None:
    trainer, worker = _begin(broker)
    threads = []
    groups: list[str] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: groups.append(_put_one(worker, 0)))
        thread.start()
        threads.append(thread)
    time.sleep(0.05)
    broker.kill()
    broker.start()
    for thread in threads:
        thread.join(20)
    assert len(set(groups)) == 4
    before = set(train(trainer, 0))
    broker.kill()
    broker.start()
    assert before | set(train(trainer, 1)) == set(groups)
    worker.close()
    trainer.close()


def test_a_second_worker_of_the_same_name_fences_the_first(broker: Process) -> None:
    trainer, worker = _begin(broker)
    second = _client(broker, "w", "rollout")
    with pytest.raises(Fenced, match="newer"):
        worker.call(Lease(want=1, wait_s=0))
    assert _put_one(second, 0)
    for client in (worker, second, trainer):
        client.close()


def test_sigterm_ends_the_broker_within_two_seconds(broker: Process) -> None:
    assert broker.stop() < 2.0


def test_an_idle_broker_uses_next_to_no_cpu(broker: Process) -> None:
    client = _client(broker, "t", "trainer")
    clock = os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        fields = Path(f"/proc/{broker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / clock

    before = cpu_s()
    time.sleep(2.0)
    assert cpu_s() - before <= 0.04
    client.close()


def test_an_unknown_request_is_refused_and_the_broker_goes_on(broker: Process) -> None:
    client = _client(broker, "c", "client")
    with pytest.raises(SlimebusError, match="only a trainer"):
        client.call(Resume(step=0, version=0, lineage="L"))
    assert _status(client)["run"] == "test"
    client.close()

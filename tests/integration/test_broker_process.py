"""A broker process with real clients around it."""

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from live_broker import LiveBroker
from scripted import LINEAGE, begin, make, train
from slimebus_command import slimebus
from waiting import wait_until

from slimebus.bus.errors import Fenced, SlimebusError
from slimebus.bus.messages import Finish, Heartbeat, HeartbeatReply, Lease, Resume
from slimebus.bus.transport.client import Client
from slimebus.cli.commands.status import EXIT_UNREACHABLE
from slimebus.client.connect import live_endpoint
from slimebus.config import resolve
from slimebus.view.run_status import RunStatus

pytestmark = pytest.mark.integration


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveBroker]:
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 6}
    with LiveBroker(tmp_path, num_prompts=20, broker={"lease_s": 4, "heartbeat_s": 0.2}, rollout=rollout) as live:
        yield live


def _begin(broker: LiveBroker) -> tuple[Client, Client]:
    trainer, worker = broker.client("t", "trainer"), broker.client("w", "rollout")
    begin(trainer)
    return trainer, worker


def test_a_worker_and_a_trainer_finish_a_run_and_the_broker_leaves_with_them(broker: LiveBroker) -> None:
    trainer, worker = _begin(broker)
    trained = []
    for step in range(6):
        for _ in range(2):
            assert make(worker, version=step)
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
    assert broker.process.wait(10) == 0
    rows = [json.loads(line) for line in (broker.run_dir / "metrics" / "broker.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))


def test_a_broker_killed_between_put_and_reply_loses_nothing(broker: LiveBroker) -> None:
    trainer, worker = _begin(broker)
    threads = []
    groups: list[str] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: groups.extend(make(worker)))
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


def test_a_second_worker_of_the_same_name_fences_the_first_with_take_over(broker: LiveBroker) -> None:
    _, worker = _begin(broker)
    second = broker.client("w")
    second.join("rollout", timeout_s=60, take_over=True)
    assert make(second), "with its first request the newer one takes the place"
    with pytest.raises(Fenced, match="newer"):
        worker.call(Lease(want=1, wait_s=0))


def test_sigterm_ends_the_broker_within_two_seconds(broker: LiveBroker) -> None:
    broker.client("c", "client")
    broker.process.terminate()
    assert broker.process.wait(2.0) == 0


def test_what_a_broker_writes_is_for_its_owner_alone(broker: LiveBroker) -> None:
    assert broker.status()["run"] == "live"
    assert broker.run_dir.stat().st_mode & 0o777 == 0o700


def test_an_idle_broker_uses_next_to_no_cpu(broker: LiveBroker) -> None:
    broker.client("t", "trainer")
    clock = os.sysconf("SC_CLK_TCK")

    def cpu_s() -> float:
        fields = Path(f"/proc/{broker.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / clock

    before = cpu_s()
    time.sleep(2.0)
    assert cpu_s() - before <= 0.04


def test_an_unknown_request_is_refused_and_the_broker_goes_on(broker: LiveBroker) -> None:
    client = broker.client("c", "client")
    with pytest.raises(SlimebusError, match="only a trainer"):
        client.call(Resume(step=0, version=0, lineage="L"))
    assert broker.status()["run"] == "live"


def test_commands_find_a_broker_on_any_free_port_also_when_it_is_started_again_on_another(tmp_path: Path) -> None:
    with LiveBroker(tmp_path, broker={"bind": "tcp://127.0.0.1:0"}) as broker:
        wait_until("the broker's address", lambda: live_endpoint(broker.run_dir))
        assert "run live: waiting for a trainer, step 0" in slimebus("status", broker.file).stdout
        assert "max_staleness" in slimebus("set", broker.file).stdout
        run = RunStatus(resolve(broker.file), None, what="test", timeout_s=10.0)
        with closing(run):
            run.poll()
            assert run.problem is None
            first = live_endpoint(broker.run_dir)
            broker.kill()
            refused = slimebus("status", broker.file)
            assert (refused.returncode, f"no broker works in {broker.run_dir}" in refused.stderr) == (EXIT_UNREACHABLE, True)
            run.timeout_s = 0.2
            run.poll()
            assert (run.problem is None, run.status["run"]) == (False, "live"), "what is known stays"
            run.timeout_s = 10.0
            with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):  # the port is another program's now
                broker.start()
                wait_until("another address", lambda: live_endpoint(broker.run_dir) not in ("", first))
                run.poll()
            assert run.problem is None

"""A broker process with real clients around it."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from live_broker import LiveBroker
from scripted import LINEAGE, beat, begin, make, train
from slimebus_command import slimebus
from waiting import wait_until

from slimebus.bus.messages import Batch, BatchReply, Finish, Heartbeat, HeartbeatReply, Hint, Resume
from slimebus.cli.commands.status import EXIT_UNREACHABLE
from slimebus.client import consumer
from slimebus.client.connect import live_endpoint
from slimebus.client.consumer import Consumer
from slimebus.config import resolve
from slimebus.view.run_status import RunStatus

pytestmark = pytest.mark.integration


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveBroker]:
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 6}
    with LiveBroker(tmp_path, num_prompts=20, broker={"lease_s": 4, "heartbeat_s": 0.2}, rollout=rollout) as live:
        yield live


def test_a_worker_and_a_trainer_finish_a_run_and_the_broker_leaves_with_them(broker: LiveBroker) -> None:
    trainer, worker = broker.client("t", "trainer"), broker.client("w", "rollout")
    begin(trainer)
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


def test_sigterm_ends_the_broker_within_two_seconds(broker: LiveBroker) -> None:
    broker.client("c", "client")
    broker.process.terminate()
    assert broker.process.wait(2.0) == 0


def test_what_a_broker_writes_is_for_its_owner_alone(broker: LiveBroker) -> None:
    assert broker.status()["run"] == "live"
    assert broker.run_dir.stat().st_mode & 0o777 == 0o700


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


def test_a_trainer_that_sends_its_request_again_and_again_hears_what_it_waits_for(broker: LiveBroker) -> None:
    trainer = broker.client("t", "trainer")
    trainer.call(Resume(step=0, version=0, lineage="L"))
    reply = trainer.call(Batch(step=0, wait_s=2.0), timeout_s=8.0).expect(BatchReply)
    assert reply.reason == "trainer waits for batch 0: 0 of 2 groups ready; no rollout worker is connected"


def test_a_consumer_may_wait_longer_than_one_request_does(broker: LiveBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "LONGEST_ASK_S", 0.5)
    with Consumer(broker.address, name="critic") as critic:
        assert critic.read(wait_s=1.6) == []
        assert broker.status()["consumers"][0]["name"] == "critic"


@pytest.mark.parametrize("is_taken", [False, True], ids=["port free", "port taken by another"])
def test_a_worker_hears_the_hints_of_a_broker_that_was_started_again(tmp_path: Path, is_taken: bool) -> None:
    with LiveBroker(tmp_path, broker={"heartbeat_s": 0.2}) as broker, socket.socket() as other:
        worker = broker.client("w")
        welcome = worker.join("rollout", timeout_s=60)
        heard: list[Hint] = []
        beat(worker, 0.2).listen(welcome.hints, heard.append)
        broker.kill()
        if is_taken:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", int(welcome.hints.rpartition(":")[2])))
            other.listen()
        broker.start()
        trainer = broker.client("t")
        again = trainer.join("trainer", timeout_s=60)
        assert (again.hints == welcome.hints) is not is_taken, "the same address where it is free"
        begin(trainer)
        wait_until("hint", lambda: any(hint.version == 0 for hint in heard), timeout_s=20)

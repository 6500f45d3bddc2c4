"""Hints of a live broker reach who listens, also after a restart at another port."""

import socket
from pathlib import Path

import pytest
from live_broker import LiveBroker
from scripted import beat, begin
from waiting import wait_until

from slimebus.bus.messages import Hint

pytestmark = pytest.mark.integration


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

"""Prompts pushed into a real broker: from Python, from files, through kills."""

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from live_broker import LiveBroker
from scripted import begin
from slimebus_command import slimebus
from waiting import wait_until

from slimebus.bus.errors import DataError, SlimebusError
from slimebus.bus.messages import Lease, LeaseReply
from slimebus.client.prompts import PromptClient

pytestmark = pytest.mark.integration


def start(folder: Path, max_pushed: int = 100_000) -> LiveBroker:
    """The broker of a run without prompts of its own."""
    rollout = {"rollout_batch_size": 4, "num_rollout": 1000}
    constants = {"MAX_PUSHED": max_pushed}
    return LiveBroker(folder, constants=constants, broker={"max_staleness": 1000}, data={"wait_for_push": True}, rollout=rollout)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveBroker]:
    with start(tmp_path) as live:
        yield live


def push(broker: LiveBroker, *words: str) -> "subprocess.CompletedProcess[str]":
    return slimebus("push", *words, "--broker", broker.address, "--timeout-s", "20")


def pushed(broker: LiveBroker) -> int:
    return int(broker.status()["source"]["pushed"])


def leased(broker: LiveBroker, count: int) -> list[str]:
    """The prompts that a worker is given, one lease after another, until there are no more or `count` came."""
    trainer, worker = broker.client("t", "trainer"), broker.client("w", "rollout")
    begin(trainer)
    found: list[str] = []
    while len(found) < count:
        reply = worker.call(Lease(want=64, wait_s=0.5, lineage="L", serving=0))
        if not reply.expect(LeaseReply).groups:
            break
        found += [msgspec.msgpack.decode(record)["prompt"] for record in reply.bulk]
    worker.close()
    trainer.close()
    return found


def test_a_broker_killed_while_prompts_are_pushed_has_each_of_them_once(broker: LiveBroker) -> None:
    texts = [f"prompt {i}" for i in range(1500)]
    with PromptClient(broker.address, timeout_s=60) as client:
        pushing = threading.Thread(
            target=lambda: [client.push(texts[start : start + 10], key=f"part/{start}") for start in range(0, 1500, 10)]
        )
        pushing.start()
        for _ in range(2):
            wait_until("prompt", lambda: pushed(broker))
            broker.kill()
            broker.start()
        pushing.join(60)
        again = [client.push(texts[start : start + 10], key=f"part/{start}") for start in range(0, 1500, 10)]
    assert sum(one.duplicate for one in again) == 1500
    assert pushed(broker) == 1500
    assert leased(broker, 1501) == texts


def test_a_file_is_pushed_once_however_often_the_command_is_given(broker: LiveBroker, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{i}", "label": i, "metadata": {"i": i}}) for i in range(700)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    file = str(tmp_path / "p.jsonl")
    first, second = push(broker, file), push(broker, file)
    assert first.stdout == f"{file}: 700 accepted, 0 duplicate: push/0 to push/699; 700 wait to be sampled\n", first
    assert "0 accepted, 700 duplicate (pushed before; another --key pushes them again)" in second.stdout
    front = push(broker, str(broker.file), file, "--key", "second time", "--front", "--json")
    assert json.loads(front.stdout)["ids"][0] == "front/0"
    assert leased(broker, 3)[:1] == ["p0"]


def test_a_malformed_line_is_named_and_nothing_is_pushed(broker: LiveBroker, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    file = str(tmp_path / "p.jsonl")
    refused = push(broker, file)
    assert refused.returncode == 2
    assert refused.stderr == f"slimebus: {file}:2: 'prompt' must be text or a list of chat messages, got a number\n"
    assert pushed(broker) == 0
    skipped = push(broker, file, "--skip-bad-prompts")
    assert f"skipped {file}:2" in skipped.stderr
    assert pushed(broker) == 1


@pytest.mark.parametrize("command", ["status", "set", "eval", "push"])
def test_a_command_with_the_file_of_another_run_says_so_and_does_nothing(broker: LiveBroker, tmp_path: Path, command: str) -> None:
    (tmp_path / "other.yaml").write_text("name: other\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    words = [command, tmp_path / "other.yaml", *([tmp_path / "p.jsonl"] if command == "push" else []), "--broker", broker.address]
    refused = slimebus(*words)
    assert refused.returncode == 2, refused
    assert "names run 'other', this broker serves run 'live'; give --name, or the address of its own broker" in refused.stderr
    assert pushed(broker) == 0
    if command in ("status", "set"):
        assert slimebus(*words, "--name", "live").returncode == 0


def test_a_client_waits_for_room_and_says_so(tmp_path: Path) -> None:
    with start(tmp_path, max_pushed=5) as broker, PromptClient(broker.address, timeout_s=20.0) as client:
        assert client.push(["a", "b", "c"]).waiting == 3
        client.timeout_s = 1.0
        with pytest.raises(SlimebusError, match=r"3 pushed prompts wait to be sampled; 3 more would be above 5 \(max_pushed\)"):
            client.push(["d", "e", "f"], key="more")
        assert leased(broker, 2)[:2] == ["a", "b"]
        client.timeout_s = 20.0
        assert client.push(["d", "e", "f"], key="more").accepted == 3
        with pytest.raises(DataError, match="prompt 1: 'prompt' must be text"):
            client.push(["fine", {"prompt": 3}])
        with pytest.raises(DataError, match="prompt 0: unknown key 'answer'"):
            client.push([{"prompt": "x", "answer": 3}])

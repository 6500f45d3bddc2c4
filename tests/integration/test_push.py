"""Prompts pushed into a real broker: from Python, from files, from a pipe, through kills."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from raw_cast import begin

from slimebus.errors import DataError, SlimebusError
from slimebus.launch import free_port
from slimebus.messages import Lease, LeaseReply, Status
from slimebus.prompts import PromptClient
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration


class LiveBroker:
    """`slimebus broker` of a run without prompts of its own; it can be killed and started again at the same address."""

    def __init__(self, folder: Path, max_pushed: int = 100_000) -> None:
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.folder, self.file = folder, folder / "run.yaml"
        self.file.write_text(
            json.dumps(
                {
                    "name": "pushed",
                    "run_dir": str(folder / "run"),
                    "broker": {"bind": self.address, "durability": "os", "max_staleness": 1000, "max_pushed": max_pushed},
                    "data": {"wait_for_push": True},
                    "rollout": {"rollout_batch_size": 4, "num_rollout": 1000},
                }
            )
        )
        self.start()

    def start(self) -> None:
        self.log = (self.folder / "broker.log").open("ab")
        self.process = subprocess.Popen([sys.executable, "-m", "slimebus", "broker", str(self.file)], stdout=self.log, stderr=self.log)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.log.close()

    def command(self, *words: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[str]":
        full = [sys.executable, "-m", "slimebus", "push", *words, "--broker", self.address, "--timeout-s", "20"]
        done = subprocess.run(full, input=stdin, capture_output=True, timeout=60, check=False)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def leased(self, count: int) -> list[str]:
        """The prompts that a worker is given, one lease after another, until there are no more or `count` came."""
        trainer, worker = Client(self.address, name="t"), Client(self.address, name="w")
        try:
            trainer.join("trainer", timeout_s=10)
            worker.join("rollout", timeout_s=10)
            begin(trainer)
            found: list[str] = []
            while len(found) < count:
                reply = worker.call(Lease(want=64, wait_s=0.5, lineage="L", serving=0))
                assert isinstance(reply.message, LeaseReply)
                if not reply.message.groups:
                    break
                found += [msgspec.msgpack.decode(record)["prompt"] for record in reply.bulk]
            return found
        finally:
            worker.close()
            trainer.close()

    def source(self) -> dict[str, Any]:
        client = Client(self.address, name="s")
        try:
            return json.loads(bytes(client.call(Status(), timeout_s=10).bulk[0]))["source"]  # type: ignore[no-any-return]
        finally:
            client.close(goodbye=False)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[LiveBroker]:
    live = LiveBroker(tmp_path)
    yield live
    live.kill()


def test_a_broker_killed_while_prompts_are_pushed_has_each_of_them_once(broker: LiveBroker) -> None:
    texts = [f"prompt {i}" for i in range(1500)]
    with PromptClient(broker.address, timeout_s=60) as client:
        pushing = threading.Thread(
            target=lambda: [client.push(texts[start : start + 10], key=f"part/{start}") for start in range(0, 1500, 10)]
        )
        pushing.start()
        for _ in range(2):
            before = time.monotonic()
            while broker.source()["pushed"] in (0, 1500) and time.monotonic() < before + 10:
                time.sleep(0.01)
            broker.kill()
            broker.start()
        pushing.join(60)
        again = [client.push(texts[start : start + 10], key=f"part/{start}") for start in range(0, 1500, 10)]
    assert sum(one.duplicate for one in again) == 1500
    assert broker.source()["pushed"] == 1500
    assert broker.leased(1501) == texts


def test_a_file_is_pushed_once_however_often_the_command_is_given(broker: LiveBroker, tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"p{i}", "label": i, "metadata": {"i": i}}) for i in range(700)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    file = str(tmp_path / "p.jsonl")
    first, second = broker.command(file), broker.command(file)
    assert first.stdout == f"{file}: 700 accepted, 0 duplicate: push/0 to push/699; 700 wait to be sampled\n", first
    assert "0 accepted, 700 duplicate (pushed before; another --key pushes them again)" in second.stdout
    front = broker.command(str(broker.file), file, "--key", "second time", "--front", "--json")
    assert json.loads(front.stdout)["ids"][0] == "front/0"
    assert broker.leased(3)[:1] == ["p0"]


def test_a_malformed_line_is_named_and_nothing_is_pushed(broker: LiveBroker, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n{"prompt": 3}\n')
    file = str(tmp_path / "p.jsonl")
    refused = broker.command(file)
    assert refused.returncode == 2
    assert refused.stderr == f"slimebus: {file}:2: 'prompt' must be text or a list of chat messages, got a number\n"
    assert broker.source()["pushed"] == 0
    skipped = broker.command(file, "--skip-bad-prompts")
    assert f"skipped {file}:2" in skipped.stderr
    assert broker.source()["pushed"] == 1


def test_a_pipe_is_pushed_as_it_comes(broker: LiveBroker) -> None:
    command = [sys.executable, "-m", "slimebus", "push", "-", "--broker", broker.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as pushing:
        assert pushing.stdin is not None
        for count in (1, 2):
            pushing.stdin.write(b'{"prompt": "a"}\n')
            pushing.stdin.flush()
            until = time.monotonic() + 20
            while broker.source()["pushed"] < count:
                assert time.monotonic() < until
                time.sleep(0.05)
        said, complaint = pushing.communicate(b'{"prompt": "b"}\noops\n', timeout=30)
    assert pushing.returncode == 2
    assert said == b""
    assert b"3 prompts were pushed" in complaint
    assert b"stdin:4: not JSON" in complaint
    assert broker.leased(4) == ["a", "a", "b"]


def test_a_client_waits_for_room_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broker = LiveBroker(tmp_path, max_pushed=5)
    try:
        with PromptClient(broker.address, timeout_s=20.0) as client:
            assert client.push(["a", "b", "c"]).waiting == 3
            client.timeout_s = 1.0
            with pytest.raises(SlimebusError, match=r"3 pushed prompts wait to be sampled; 3 more would be above 5 \(max_pushed\)"):
                client.push(["d", "e", "f"], key="more")
            assert broker.leased(2)[:2] == ["a", "b"]
            client.timeout_s = 20.0
            assert client.push(["d", "e", "f"], key="more").accepted == 3
            with pytest.raises(DataError, match="prompt 1: 'prompt' must be text"):
                client.push(["fine", {"prompt": 3}])
            with pytest.raises(DataError, match="prompt 0: unknown key 'answer'"):
                client.push([{"prompt": "x", "answer": 3}])
    finally:
        broker.kill()

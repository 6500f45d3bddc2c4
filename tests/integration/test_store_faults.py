"""A broker process whose disk fills up, is read-only or is damaged, with real clients around it."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from raw_cast import begin, put, train

from slimebus.launch import free_port
from slimebus.messages import (
    Heartbeat,
    Lease,
    LeaseReply,
    PutReply,
    Status,
)
from slimebus.samples import Sample
from slimebus.transport.client import Client

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]

_spec = importlib.util.spec_from_file_location("small_disk", ROOT / "tests/broker/store/small_disk.py")
assert _spec is not None
assert _spec.loader is not None
small = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(small)

LENGTH = 20_000
"""Tokens of a sample: a group takes up 360 kB."""


def write_run(folder: Path, durability: str = "fsync", **broker: Any) -> tuple[Path, str]:
    """A RUN.yaml whose run directory is `folder`/run, and the broker's address."""
    address = f"tcp://127.0.0.1:{free_port()}"
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "p{i}", "label": "{i}"}}\n' for i in range(2000)))
    config = {
        "name": "faults",
        "run_dir": str(folder / "run"),
        "broker": {"bind": address, "durability": durability, "lease_s": 8, "heartbeat_s": 0.5, "max_staleness": 100, **broker},
        "data": {"prompt_data": ["prompts.jsonl"]},
        "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1000},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    return folder / "run.yaml", address


def start(file: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "slimebus", "broker", str(file)]
    return subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)


class Cast:
    """A trainer and a worker of lineage L, version 0, by their raw messages."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.trainer, self.worker = self._client("t", "trainer"), self._client("w", "rollout")
        self.leases: list[int] = []
        self.put_ids: list[str] = []

    def _client(self, name: str, role: str) -> Client:
        client = Client(self.address, name=name, resend_s=0.5)
        welcome = client.join(role, timeout_s=60)
        beat = (lambda: Heartbeat(lineage="L", leases=self.leases)) if role == "rollout" else (lambda: Heartbeat(lineage="L"))
        client.keep_alive(welcome.heartbeat_s, beat, lambda reply: None, lambda problem: None)
        return client

    def put_one(self) -> PutReply | None:
        reply = self.worker.call(Lease(want=1, wait_s=0.2, lineage="L", serving=0), timeout_s=60).message
        assert isinstance(reply, LeaseReply)
        if not reply.groups:
            return None
        group = reply.groups[0]
        self.leases.append(group.lease)
        noise = np.random.default_rng(group.lease)
        sample = Sample(
            tokens=noise.integers(0, 1 << 30, LENGTH).astype(np.int32),
            loss_mask=np.ones(LENGTH, np.uint8),
            rollout_logprobs=noise.random(LENGTH).astype(np.float32),
            versions=[(0, LENGTH)],
            reward=1.0,
        )
        answer = put(self.worker, group, [sample] * group.num_samples)
        if answer.result != "discarded":
            self.put_ids.append(group.group)
        return answer

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(bytes(self.trainer.call(Status(), timeout_s=20).bulk[0]))
        return found

    def close(self) -> None:
        for client in (self.worker, self.trainer):
            client.close(goodbye=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small.small_disk(tmp_path / "disk", 32) as folder:
        yield folder


def test_a_run_whose_disk_fills_up_goes_on_when_there_is_room(disk: Path) -> None:
    file, address = write_run(disk)
    process = start(file)
    cast = Cast(address)
    try:
        begin(cast.trainer)
        for _ in range(6):
            assert cast.put_one()
        hog = small.fill(disk)
        blocked = threading.Thread(target=cast.put_one)
        deadline = time.monotonic() + 60
        while not any("full" in line for line in cast.status()["waiting"]) and time.monotonic() < deadline:
            if not blocked.is_alive():
                blocked = threading.Thread(target=cast.put_one)
                blocked.start()
            time.sleep(0.2)
        status = cast.status()
        assert any("full" in line and "make room there" in line for line in status["waiting"]), status["waiting"]
        before = list(cast.put_ids)
        trained = [*train(cast.trainer, 0, checkpoint=1), *train(cast.trainer, 1, checkpoint=2)]  # what frees room goes on
        time.sleep(10)  # longer than a lease lives
        assert process.poll() is None
        hog.unlink()
        blocked.join(60)
        assert not blocked.is_alive(), "the put went through by itself"
        assert "expired" not in json.dumps(cast.status()["moves"]), "no lease ran out meanwhile"
        while cast.put_one() is None:
            assert time.monotonic() < deadline + 60
            time.sleep(0.2)
        process.kill()
        process.communicate(timeout=10)
        process = start(file)
        for step in range(2, len(cast.put_ids) // 2):
            trained += train(cast.trainer, step, checkpoint=step + 1)
        assert len(trained) == len(set(trained)), "nothing is trained twice"
        assert set(before) <= set(trained) | set(cast.put_ids[-2:]), "nothing acknowledged is lost"
        assert set(trained) >= set(cast.put_ids[: 2 * (len(cast.put_ids) // 2)])
    finally:
        cast.close()
        process.kill()
        _, log = process.communicate(timeout=10)
    assert "Traceback" not in log


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_kill_9_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, durability: str) -> None:
    file, address = write_run(tmp_path, durability)
    process = start(file)
    cast = Cast(address)
    try:
        begin(cast.trainer)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                cast.put_one()

        worker = threading.Thread(target=work)
        worker.start()
        for pause in (0.7, 0.4, 1.1):
            time.sleep(pause)
            process.kill()
            process.communicate(timeout=10)
            process = start(file)
        deadline = time.monotonic() + 90
        while len(cast.put_ids) < 12:
            assert time.monotonic() < deadline, f"only {len(cast.put_ids)} groups were put"
            time.sleep(0.1)
        stop.set()
        worker.join(60)
        assert len(set(cast.put_ids)) == len(cast.put_ids), "no attempt was accepted twice"
        trained = [name for step in range(len(cast.put_ids) // 2) for name in train(cast.trainer, step, checkpoint=step + 1)]
        assert len(set(trained)) == len(trained)
        assert len(set(cast.put_ids) - set(trained)) <= 1, "acknowledged groups were lost"
    finally:
        cast.close()
        process.kill()
        process.communicate(timeout=10)


def refused(file: Path) -> str:
    process = start(file)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2, log
    assert "Traceback" not in log
    return log.splitlines()[-1]


def test_stores_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    file, _ = write_run(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "broker").write_text("a file")
    assert "is a file; move it" in refused(file)
    (run_dir / "broker").unlink()
    (run_dir / "broker").mkdir()
    (run_dir / "broker" / "data.mdb").write_bytes(os.urandom(100_000))
    assert "damaged" in (line := refused(file))
    assert "slimebus buffer restore" in line


def test_a_read_only_disk_is_refused_in_one_line(disk: Path) -> None:
    file, address = write_run(disk)
    process = start(file)
    cast = Cast(address)
    cast.close()
    process.kill()
    process.communicate(timeout=10)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
    line = refused(file)
    assert "cannot be written" in line or "Read-only" in line
    assert "write access" in line or "run directory" in line


def test_an_unwritten_status_does_not_hide_how_the_run_ended(disk: Path) -> None:
    file, address = write_run(disk)
    process = start(file)
    cast = Cast(address)
    cast.close()
    small.fill(disk)
    process.terminate()
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "Traceback" not in log

"""A broker process with a disk that fills up, is read-only or is damaged, with real clients around it."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from live_broker import LiveBroker
from scripted import beat, begin, lease, put, train
from small_disk import fill, small_disk
from waiting import wait_until

from slimebus.bus.messages import Lease, PutReply
from slimebus.bus.samples import Sample

pytestmark = pytest.mark.integration

LENGTH = 20_000
"""Tokens of a sample: a group takes up 360 kB."""


def start(folder: Path, run_dir: Path, durability: str = "fsync") -> LiveBroker:
    broker = {"durability": durability, "lease_s": 8, "heartbeat_s": 0.5, "max_staleness": 100}
    rollout = {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1000}
    return LiveBroker(folder, run_dir=run_dir, num_prompts=2000, broker=broker, rollout=rollout)


class Cast:
    """A trainer and a worker of lineage L, version 0, by their raw messages."""

    def __init__(self, broker: LiveBroker) -> None:
        self.trainer, self.worker = broker.client("t", "trainer"), broker.client("w", "rollout")
        self.leases: list[int] = []
        self.put_ids: list[str] = []
        for client, leases in ((self.trainer, []), (self.worker, self.leases)):
            beat(client, 0.5, lineage="L", leases=leases)

    def put_one(self) -> PutReply | None:
        groups = lease(self.worker, wait_s=0.2)
        if not groups:
            return None
        (group,) = groups
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


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 32) as folder:
        yield folder


def test_a_run_whose_disk_fills_up_goes_on_when_there_is_room(tmp_path: Path, disk: Path) -> None:
    with start(tmp_path, disk / "run") as broker:
        cast = Cast(broker)
        begin(cast.trainer)
        for _ in range(6):
            wait_until("put", cast.put_one, 60)
        fill(disk, leave_bytes=1 << 20)  # half of what is left to what frees room
        blocked = threading.Thread(target=cast.put_one)

        def full() -> list[str]:
            nonlocal blocked
            if not blocked.is_alive():
                blocked = threading.Thread(target=cast.put_one)
                blocked.start()
            return [line for line in broker.status()["waiting"] if "full" in line]

        assert "make room there" in wait_until("word of the full disk", full, 60, every_s=0.2)[0]
        before = list(cast.put_ids)
        trained = [*train(cast.trainer, 0, checkpoint=1), *train(cast.trainer, 1, checkpoint=2)]  # what frees room goes on
        hog = fill(disk)
        time.sleep(10)  # longer than a lease lives
        assert broker.process.poll() is None
        hog.unlink()
        blocked.join(60)
        assert not blocked.is_alive(), "the put went through by itself"
        assert "expired" not in json.dumps(broker.status()["moves"]), "no lease ran out meanwhile"
        wait_until("put", cast.put_one, 60)
        broker.kill()
        broker.start()
        for step in range(2, len(cast.put_ids) // 2):
            trained += train(cast.trainer, step, checkpoint=step + 1)
        assert len(trained) == len(set(trained)), "nothing is trained twice"
        assert set(before) <= set(trained) | set(cast.put_ids[-2:]), "nothing acknowledged is lost"
        assert set(trained) >= set(cast.put_ids[: 2 * (len(cast.put_ids) // 2)])
    assert "Traceback" not in broker.log.read_text()


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_kill_9_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, durability: str) -> None:
    with start(tmp_path, tmp_path / "run", durability) as broker:
        cast = Cast(broker)
        begin(cast.trainer)
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                cast.put_one()

        worker = threading.Thread(target=work)
        worker.start()
        for pause in (0.7, 0.4, 1.1):
            time.sleep(pause)
            broker.kill()
            broker.start()
        wait_until("12 groups put", lambda: len(cast.put_ids) >= 12, 90)
        stop.set()
        worker.join(60)
        assert len(set(cast.put_ids)) == len(cast.put_ids), "no attempt was accepted twice"
        trained = [name for step in range(len(cast.put_ids) // 2) for name in train(cast.trainer, step, checkpoint=step + 1)]
        assert len(set(trained)) == len(trained)
        assert len(set(cast.put_ids) - set(trained)) <= 1, "acknowledged groups were lost"


def refused(broker: LiveBroker) -> str:
    assert broker.process.wait(60) == 2, broker.log.read_text()
    assert "Traceback" not in broker.log.read_text()
    return broker.log.read_text().splitlines()[-1]


def test_stores_that_cannot_be_used_are_refused_in_one_line(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "broker").write_text("a file")
    with start(tmp_path, run_dir) as broker:
        assert "is a file; move it" in refused(broker)
        (run_dir / "broker").unlink()
        (run_dir / "broker").mkdir()
        (run_dir / "broker" / "data.mdb").write_bytes(os.urandom(100_000))
        broker.start()
        assert "damaged" in (line := refused(broker))
        assert "slimebus buffer verify" in line


def test_a_read_only_disk_is_refused_in_one_line(tmp_path: Path, disk: Path) -> None:
    with start(tmp_path, disk / "run") as broker:
        Cast(broker)
        broker.kill()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=20)
        broker.start()
        line = refused(broker)
        assert "cannot be written" in line or "Read-only" in line
        assert "write access" in line or "run directory" in line


def test_an_unwritten_status_does_not_hide_how_the_run_ended(tmp_path: Path, disk: Path) -> None:
    with start(tmp_path, disk / "run") as broker:
        Cast(broker)
        fill(disk)
        broker.process.terminate()
        assert broker.process.wait(30) == 0, broker.log.read_text()
        assert "Traceback" not in broker.log.read_text()


def test_a_store_that_is_cut_short_under_a_working_broker_is_named_in_its_log_and_refused_by_the_next(tmp_path: Path) -> None:
    with start(tmp_path, tmp_path / "run") as broker:
        cast = Cast(broker)
        begin(cast.trainer)
        file = broker.run_dir / "broker" / "data.mdb"
        os.truncate(file, 2 * 4096)
        cast.worker.submit(Lease(want=1, wait_s=0.0, lineage="L", serving=0))
        broker.process.wait(20)
        log = broker.log.read_text()
        assert "Fatal Python error: Bus error" in log
        assert "lmdb_store.py" in log
        broker.start()
        assert broker.process.wait(20) == 2
        assert f"the broker's store at {file.parent} is damaged: data.mdb was cut short" in broker.log.read_text()

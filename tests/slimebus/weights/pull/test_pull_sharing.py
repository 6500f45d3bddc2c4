"""Workers of one host: one pulls, the others take what it pulled, and nobody depends on anybody."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import wait_until

from slimebus.bus.errors import WeightsError
from slimebus.weights.files.disk_chain import DiskChain, DiskPuller
from slimebus.weights.host.file_lock import FileLock
from slimebus.weights.host.shared_folder import SharedFolder, remove_stale_files
from slimebus.weights.messages import VersionGone
from slimebus.weights.pull import pull_loop
from slimebus.weights.pull.pull_loop import HostPullSharing
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore

NUM_TENSORS, NUM_VALUES = 40, 50_000
SIZE = NUM_TENSORS * NUM_VALUES * 2


def values(seed: int, changed: int = NUM_TENSORS) -> dict[str, np.ndarray]:
    """The tensors of seed 0, with the first `changed` of them made from `seed`."""
    made = {}
    for i in range(NUM_TENSORS):
        rng = np.random.default_rng([seed if i < changed else 0, i])
        made[f"t{i:02d}"] = rng.integers(0, 1 << 16, NUM_VALUES, dtype=np.uint16)
    return made


class Host:
    """A publisher, and workers of one host that pull from it."""

    def __init__(self, root: Path, closing: Any) -> None:
        self.root, self.closing, self.store = root, closing, VersionStore(lineage="one")
        self.server = closing(WeightServer(self.store))

    def sharing(self) -> HostPullSharing:
        """Another worker's part in it."""
        return HostPullSharing(self.closing(SharedFolder(self.root)), self.server.endpoint)

    @contextmanager
    def pulling(self) -> Iterator[HostPullSharing]:
        """Another worker has the lock meanwhile."""
        other = self.sharing()
        other.begin()
        yield other
        other.end()

    def join(self, **options: Any) -> WeightPuller:
        """The puller of another worker."""
        return self.closing(WeightPuller([self.server.endpoint], host=self.sharing(), **options))


@pytest.fixture
def host(tmp_path: Path, closing: Any) -> Host:
    return Host(tmp_path, closing)


def test_workers_that_pull_at_once_load_the_publisher_with_one_copy(host: Host) -> None:
    published = host.store.publish(values(1))
    pullers = [host.join() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        pulled = list(pool.map(lambda puller: puller.pull(deadline_s=30), pullers))
    assert {weights.digest for weights in pulled} == {published.digest}
    assert host.server.sent_bytes == SIZE
    assert sum(puller.counts["received_bytes"] for puller in pullers) == SIZE
    assert sum(puller.counts["neighbour_bytes"] for puller in pullers) == 3 * SIZE
    assert sum(puller.counts["neighbour_tensors"] for puller in pullers) == 3 * NUM_TENSORS


def test_what_changed_travels_once_too(host: Host) -> None:
    host.store.publish(values(1))
    pullers = [host.join(), host.join()]
    have = [puller.pull(deadline_s=30) for puller in pullers]
    host.store.publish(values(2, changed=10) | {name: v for name, v in values(1).items() if int(name[1:]) >= 10})
    before = host.server.sent_bytes
    newer = [puller.pull(weights, deadline_s=30) for puller, weights in zip(pullers, have, strict=True)]
    assert newer[0].digest == newer[1].digest
    assert host.server.sent_bytes - before <= 10 * NUM_VALUES * 2
    assert pullers[1].counts["received_bytes"] == 0
    assert newer[1].tensors["t20"] is have[1].tensors["t20"], "what did not change is not taken again"


def test_the_pull_of_a_worker_that_dies_is_finished_by_the_next(host: Host) -> None:
    published = host.store.publish(values(1))
    code = f"""
import os, signal
from pathlib import Path
from slimebus.weights.host.shared_folder import SharedFolder
from slimebus.weights.pull.pull_loop import HostPullSharing
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.pull.plan import PullPlan
keep_verified, kept = PullPlan.keep_verified, []
def dying(self, job, target):
    keep_verified(self, job, target)
    kept.append(job)
    if len(kept) == {NUM_TENSORS // 2}:
        print("in the middle", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
PullPlan.keep_verified = dying
host = HostPullSharing(SharedFolder(Path({str(host.root)!r})), {host.server.endpoint!r})
WeightPuller([{host.server.endpoint!r}], host=host).pull(deadline_s=60)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in the middle\n"
    puller = host.join()
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(puller.pull, deadline_s=30)
        wait_until("half of the tensors", lambda: puller.counts["neighbour_tensors"] >= NUM_TENSORS // 2)
        assert not pulling.done(), "it waits for the other, who has the lock"
        assert puller.counts["received_bytes"] == 0
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
        weights = pulling.result(timeout=30)
    assert weights.digest == published.digest
    assert puller.counts["neighbour_tensors"] == NUM_TENSORS // 2
    assert puller.counts["received_bytes"] == SIZE // 2


def test_a_worker_that_hangs_with_the_lock_is_not_waited_for(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_loop, "LOCK_SILENCE_S", 0.3)
    published = host.store.publish(values(1))
    with host.pulling() as hanging:
        assert hanging.is_puller
        waiting = host.join()
        have = waiting.pull(deadline_s=30)
        assert have.digest == published.digest
        monkeypatch.setattr(pull_loop, "LOCK_SILENCE_S", 1000.0)
        newer = host.store.publish(values(2))
        assert waiting.pull(have, deadline_s=10).digest == newer.digest, "once for all versions"


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("/etc/hostname")])
def test_a_lock_file_that_cannot_be_opened_is_not_waited_for(
    host: Host, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(pull_loop, "LOCK_SILENCE_S", 0.1)
    published = host.store.publish(values(1))
    puller = host.join()
    assert puller._host is not None
    make(puller._host._lock.path)
    assert puller.pull(deadline_s=30).digest == published.digest


def test_a_tensor_that_is_begun_anew_takes_its_memory_once(host: Host) -> None:
    """As where versions follow each other faster than a large tensor comes."""
    published = host.store.publish(values(1))
    begun: list[int] = []

    def gone_in_the_middle(lineage: str, version: int, name: str, base: int) -> memoryview:
        if name == "t39":
            begun.append(len(list(host.root.glob("slimebus-weights-*/unfinished/*"))))
            if len(begun) in (3, 6, 9, 12):
                raise VersionGone("it has changed")
        return host.store.read(lineage, version, name, base)

    host.server._store = SimpleNamespace(manifest=host.store.manifest, read=gone_in_the_middle)
    assert host.join(credits=1, chunk_bytes=1 << 15).pull(deadline_s=30).digest == published.digest
    assert len(begun) > 12
    assert max(begun) <= 2


def test_all_parts_together_must_have_room(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = values(1)
    other = VersionStore(lineage=host.store.lineage)
    host.store.publish({name: tensor for name, tensor in parts.items() if name < "t20"})
    other.publish({name: tensor for name, tensor in parts.items() if name >= "t20"})
    puller = host.closing(WeightPuller([host.server.endpoint, host.closing(WeightServer(other)).endpoint], host=host.sharing()))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=SIZE - 1))
    with pytest.raises(WeightsError, match=f"no room for {SIZE} bytes"):
        puller.pull(deadline_s=30)
    assert puller.counts["received_bytes"] == 0


def test_a_worker_that_waits_too_long_says_for_whom(host: Host) -> None:
    host.store.publish(values(1))
    expected = rf"process {os.getpid()} on this host pulls from .*; this one waited"
    with host.pulling(), pytest.raises(WeightsError, match=expected):
        host.join().pull(deadline_s=0.3)


def test_a_newer_version_while_a_neighbour_pulls_the_older_is_followed(host: Host) -> None:
    host.store.publish(values(1))
    old = host.join()
    old.pull(deadline_s=30)
    with ThreadPoolExecutor(1) as pool:
        with host.pulling():
            newest = host.store.publish(values(2))
            waiting = pool.submit(host.join().pull, deadline_s=30)
            time.sleep(0.2)
        assert waiting.result(timeout=30).digest == newest.digest


def test_only_the_one_that_pulls_says_that_it_serves(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store.publish(values(1))
    asked: list[str] = []
    manifest = WeightPuller._manifest

    def spied(self: WeightPuller, link: object, request: object, deadline: float) -> object:
        asked.append(request.serves)  # type: ignore[attr-defined]
        return manifest(self, link, request, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(WeightPuller, "_manifest", spied)
    first, second = host.join(serves="tcp://first:1"), host.join(serves="tcp://second:1")
    assert first._host is not None
    first._host.begin()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(second.pull, deadline_s=30)
        time.sleep(0.1)
        first.pull(deadline_s=30)
        waiting.result(timeout=30)
    assert asked == ["", "tcp://first:1"]


def test_memory_that_is_full_ends_the_pull_and_nothing_half_written_stays(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.store.publish(values(1))
    fallocate, calls = os.posix_fallocate, []

    def full(descriptor: int, offset: int, length: int) -> None:
        calls.append(length)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        fallocate(descriptor, offset, length)

    puller = host.join()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(WeightsError, match=r"no room for 100000 bytes.*weights\.weights_shm"):
        puller.pull(deadline_s=30)
    assert not list(host.root.glob("slimebus-weights-*/unfinished/*"))
    assert not list(host.root.glob("slimebus-pull-*"))


def test_a_directory_of_deltas_is_read_once_on_a_host(tmp_path: Path, closing: Any) -> None:
    store = VersionStore(lineage="one")
    chain = DiskChain(tmp_path / "chain", "one")
    newest = store.publish(values(1))
    chain.write(store)
    chain.announce(newest.version, newest.digest)
    pullers = [DiskPuller(chain.folder, host=HostPullSharing(closing(SharedFolder(tmp_path)), "chain")) for _ in range(2)]
    have = [puller.pull(deadline_s=30) for puller in pullers]
    for seed in (2, 3):
        newest = store.publish(values(seed))
        chain.write(store)
        chain.announce(newest.version, newest.digest)
    newer = [puller.pull(weights, deadline_s=30) for puller, weights in zip(pullers, have, strict=True)]
    assert {weights.digest for weights in newer} == {newest.digest}
    assert pullers[1].counts["received_bytes"] == 0
    assert pullers[1].counts["neighbour_bytes"] == 2 * SIZE


def test_the_lock_goes_to_one_and_then_to_the_next(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.acquire()
    assert not second.acquire()
    first.release()
    assert second.acquire()
    assert not first.acquire()
    second.release()
    assert not (tmp_path / "lock").exists()


def test_the_lock_file_of_a_worker_that_was_killed_is_removed(tmp_path: Path) -> None:
    (left := tmp_path / f"slimebus-pull-{os.geteuid()}-left").write_text("1")
    taken = FileLock(tmp_path / f"slimebus-pull-{os.geteuid()}-taken")
    taken.acquire()
    remove_stale_files(tmp_path)
    assert not left.exists()
    assert not FileLock(tmp_path / f"slimebus-pull-{os.geteuid()}-taken").acquire()
    taken.release()


def test_a_cancelled_pull_stops_waiting_for_the_lock(host: Host) -> None:
    host.store.publish(values(1))
    puller = host.join()
    timer = threading.Timer(0.2, puller.cancel)
    timer.start()
    with host.pulling(), pytest.raises(WeightsError, match="cancelled"):
        puller.pull(deadline_s=30)
    timer.join()

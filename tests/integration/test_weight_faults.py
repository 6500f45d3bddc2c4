"""Killed trainers and workers, liars, and timelines that begin anew: engines serve verified versions of the current lineage, or nothing.

Publishers, workers and engines are processes. Somebody who knows the true weights of every version asks the engines all the while.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from slow_link import SlowLink
from waiting import wait_until
from weight_run import Child, Observer, judge

from slimebus.weights.host.shared_folder import PREFIX

pytestmark = pytest.mark.integration

KIB = 1 << 10


class Stage:
    """Starts the processes of one test, and ends them."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model, self._opened = folder, model, []
        self.shm = folder / "shm"
        self.shm.mkdir()

    def opened(self, closable: Any) -> Any:
        self._opened.append(closable)
        return closable

    def publisher(
        self,
        lineage: str,
        first: int = 0,
        last: int | None = None,
        *,
        every_s: float = 0.0,
        keep: int = 4,
        bind: str = "",
        lies: bool = False,
    ) -> Child:
        """One that serves by the time this returns. last: of the versions it publishes, one every every_s seconds."""
        words = [lineage, first, first if last is None else last, every_s, keep, bind or "tcp://127.0.0.1:0", *["lies"] * lies]
        child = self.opened(Child(self.folder, f"publisher-{lineage}", "publisher", self.model, *words))
        child.wait_for("a publisher", lambda s: "endpoint" in s)
        return child

    def worker(self, name: str = "w") -> Child:
        child = self.opened(Child(self.folder, name, "worker", self.model, self.shm, self.folder, name))
        child.wait_for("a worker", lambda s: "url" in s)
        return child

    def link(self, publisher: Child, rate: float | None = None) -> SlowLink:
        return self.opened(SlowLink(endpoint(publisher), rate))

    def close(self) -> None:
        for closable in reversed(self._opened):
            closable.close()


@pytest.fixture
def stage(tmp_path: Path, task: Path) -> Iterator[Stage]:
    made = Stage(tmp_path, task / "model")
    yield made
    made.close()


def endpoint(publisher: Child) -> str:
    return str(publisher.said[-1]["endpoint"])


def in_the_middle(link: SlowLink, size: int) -> None:
    """Wait until about half of the bytes came over the link since now."""
    before = link.carried
    wait_until("half of a pull", lambda: link.carried - before > size // 2)


def test_a_trainer_killed_in_the_middle_of_a_pull_and_its_successor_from_an_older_checkpoint(stage: Stage) -> None:
    """Version 4 never comes; the new lineage goes back to version 1, and its numbers mean other weights than before."""
    old = stage.publisher("old", first=2, last=4)
    link, worker = stage.link(old), stage.worker()
    worker.announce("old", 2, link.endpoint)
    worker.wait_serving("old", 2)
    assert [old.publish(), old.publish()] == [3, 4]
    link.rate = 40 * KIB
    observer = Observer(worker)
    observer.wait_for("old:2")
    worker.announce("old", 4, link.endpoint)
    in_the_middle(link, 100 * KIB)
    old.kill()
    time.sleep(2.0)
    assert worker.serving == "old:2", "what is verified is served on until there is something newer"
    new = stage.publisher("new", first=1, last=2)
    worker.announce("new", 1, endpoint(new))
    observer.wait_for("new:1")
    new.publish()
    worker.announce("new", 2, endpoint(new))
    observer.wait_for("new:2")
    order = judge(observer.stop(), stage.model, stage.folder, {"old:2", "new:1", "new:2"})
    assert order == ["old:2", "new:1", "new:2"]


def test_a_trainer_that_was_replaced_but_lives_on_is_not_listened_to(stage: Stage) -> None:
    """As after a network partition: it still publishes, with higher numbers, while its successor's are announced."""
    old = stage.publisher("old", first=5, last=60, every_s=0.2)
    worker = stage.worker()
    worker.announce("old", 5, endpoint(old))
    worker.wait_for("the old lineage", lambda s: s["lineage"] == "old")
    observer = Observer(worker)
    new = stage.publisher("new", first=1)
    worker.announce("new", 1, endpoint(new))
    observer.wait_for("new:1")
    for _ in range(10):
        worker.announce("new", 1, endpoint(new))
        time.sleep(0.15)
    seen = observer.stop()
    newest = old.said[-1]["version"]
    order = judge(seen, stage.model, stage.folder, {"new:1", *(f"old:{v}" for v in range(5, newest + 1))})
    assert order[-1] == "new:1"
    assert not any(tag.startswith("old") for tag in order[order.index("new:1") :])
    assert worker.serving == "new:1"


def test_a_publisher_of_garbage_changes_nothing_and_a_good_one_is_taken_up(stage: Stage) -> None:
    good, worker = stage.publisher("one", first=3), stage.worker()
    worker.announce("one", 3, endpoint(good))
    worker.wait_serving("one", 3)
    observer = Observer(worker)
    observer.wait_for("one:3")
    liar = stage.publisher("two", first=0, lies=True)
    worker.announce("two", 0, endpoint(liar))
    worker.wait_for("refused bytes", lambda s: s["failures"] >= 2)
    assert worker.serving == "one:3"
    honest = stage.publisher("two", first=1)
    worker.announce("two", 1, endpoint(honest))
    worker.wait_serving("two", 1)
    observer.wait_for("two:1")
    assert judge(observer.stop(), stage.model, stage.folder, {"one:3", "two:1"}) == ["one:3", "two:1"]


def test_versions_collected_during_each_pull_are_followed_to_newer_ones(stage: Stage) -> None:
    """keep = 1 and a publish several times within each pull: every base and every delta is gone before it is fetched whole."""
    publisher = stage.publisher("one", last=1000, every_s=0.25, keep=1)
    link, worker = stage.link(publisher, rate=600 * KIB), stage.worker()
    observer = Observer(worker)

    def served() -> list[int]:
        return [int(s.tag.rpartition(":")[2]) for s in list(observer.seen) if ":" in s.tag]

    def has_followed() -> bool:
        worker.announce("one", publisher.said[-1]["version"], link.endpoint)
        time.sleep(0.1)
        return len(set(served())) >= 4

    wait_until("four versions, one after another", has_followed, timeout_s=90)
    last = int(publisher.said[-1]["version"])
    judge(observer.stop(), stage.model, stage.folder, {f"one:{v}" for v in range(last + 2)})
    assert served() == sorted(served()), "it went back"


def folders(stage: Stage) -> list[Path]:
    return [path for path in stage.shm.glob(f"{PREFIX}*") if path.is_dir()]


def test_workers_killed_in_the_middle_of_an_update_harm_nobody_and_leave_nothing(stage: Stage) -> None:
    """Killed while it receives, while it applies and while its engine loads, as chance has it; its neighbour serves on."""
    publisher = stage.publisher("one", last=200, every_s=0.15)
    neighbour = stage.worker("neighbour")
    observer = Observer(neighbour)

    def announce(*workers: Child) -> int:
        version = int(publisher.said[-1]["version"])
        for worker in workers:
            worker.announce("one", version, endpoint(publisher))
        return version

    announce(neighbour)
    neighbour.wait_for("a version", lambda s: s["version"] >= 0)
    for turn in range(2):
        victim = stage.worker(f"victim-{turn}")
        until = time.monotonic() + 0.6 + 0.23 * turn
        while time.monotonic() < until:
            announce(neighbour, victim)
            time.sleep(0.05)
        family = victim.family()
        assert len(family) >= 2, "the worker has an engine below it"
        victim.kill()
        _, alive = psutil.wait_procs(family, timeout=15)
        assert not alive, f"outlived their worker: {[p.cmdline() for p in alive]}"
    newest = announce(neighbour)
    neighbour.wait_for("the newest version", lambda s: s["version"] >= newest)
    successor = stage.worker("successor")
    successor.announce("one", newest, endpoint(publisher))
    successor.wait_for("a version", lambda s: s["version"] >= newest)
    assert len(folders(stage)) == 2, "the shared memory of the killed ones is given back"
    last = int(publisher.said[-1]["version"])
    order = judge(observer.stop(), stage.model, stage.folder, {f"one:{v}" for v in range(last + 2)})
    assert len(order) >= 3


def test_a_worker_whose_publisher_trickles_serves_on_and_takes_the_next_lineage_at_once(stage: Stage) -> None:
    old, worker = stage.publisher("old", last=1), stage.worker()
    link = stage.link(old)
    worker.announce("old", 0, link.endpoint)
    worker.wait_serving("old", 0)
    observer = Observer(worker)
    observer.wait_for("old:0")
    old.publish()
    link.rate = 1.0
    worker.announce("old", 1, link.endpoint)
    time.sleep(1.5)
    assert worker.serving == "old:0"
    new = stage.publisher("new")
    worker.announce("new", 0, endpoint(new))
    started = time.monotonic()
    worker.wait_serving("new", 0)
    assert time.monotonic() - started < 10, "it waited for a pull that can no longer matter"
    observer.wait_for("new:0")
    assert judge(observer.stop(), stage.model, stage.folder, {"old:0", "new:0"}) == ["old:0", "new:0"]

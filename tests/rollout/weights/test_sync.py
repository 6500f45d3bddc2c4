"""A worker's engines follow a real weight server; the engines here only remember what they were told."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.weights.sync import WeightSync
from slimebus.bus.errors import ConfigError, SlimebusError, WeightsError
from slimebus.bus.messages import NO_VERSION
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.host.shared_folder import SharedVersion
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore


def values(first: int) -> dict[str, np.ndarray]:
    return {"w": np.array([first, 2, 3], np.uint16)}


def whole(first: int) -> str:
    return VersionStore().publish(values(first)).digest


class Stage:
    """Versions of lineage `one`, n beginning with 10 + n; and engines that load what they are given, unless told to fail the next time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, VersionStore(lineage="one")
        self.server = WeightServer(self.store)
        self.loaded: list[int] = []
        self.fail_next = self.loses_first = False
        self.on_lost: Callable[[], None] = lambda: None
        self.served_while_loading: list[int] = []

    async def update_weights(self, version: SharedVersion) -> None:
        """As an EnginePool."""
        self.served_while_loading.append(self.sync.serving[1])
        if self.fail_next:
            self.fail_next = False
            raise WeightsError("an engine would not load it")
        assert read_model(version.directory)["w"].buffer.view(np.uint16)[0] == 10 + version.version
        self.loaded.append(version.version)
        if self.loses_first and len(self.loaded) == 1:
            asyncio.get_running_loop().call_soon(self.on_lost)

    async def until_ready(self) -> None:
        """At once."""

    def publish(self, number: int = 1) -> None:
        for _ in range(number):
            self.store.publish(values(10 + self.store.next_version))

    def announce(self, version: int, digest: str | None = None, lineage: str = "one") -> None:
        self.sync.announce(lineage, version, [self.server.endpoint], whole(10 + version) if digest is None else digest)

    def make_sync(self, pull_timeout_s: float = 5.0) -> WeightSync:
        engines: Any = self
        self.sync = WeightSync(engines, self.folder, shm=str(self.folder), pull_timeout_s=pull_timeout_s, on_change=lambda: None)
        return self.sync

    @contextlib.asynccontextmanager
    async def following(self, **limits: float) -> AsyncIterator[WeightSync]:
        sync = self.make_sync(**limits)
        task = asyncio.create_task(sync.run())
        try:
            async with asyncio.timeout(20):
                yield sync
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            sync.close()

    def follow(self, until: int, *announced: int, during: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Announce these versions at once, do this, and return once version `until` is served."""

        async def run() -> None:
            async with self.following() as sync:
                for version in announced:
                    self.announce(version)
                if during is not None:
                    await during()
                await have(lambda: sync.serving == ("one", until) and sync.stage_s)

        asyncio.run(run())


async def have(is_so: Callable[[], Any]) -> None:
    while not is_so():
        await asyncio.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    made.publish()
    yield made
    made.server.close()


def test_an_announced_version_is_pulled_loaded_and_served_and_a_newer_one_replaces_it(stage: Stage) -> None:
    stage.follow(0, 0)
    assert stage.loaded == [0]
    assert set(stage.sync.stage_s) == {"wire", "verify", "share", "load"}
    assert sum(stage.sync.stage_s.values()) < stage.sync.last_sync_s
    assert not list(stage.folder.glob("slimebus-weights-*")), "the shared memory is freed"
    stage.publish()
    stage.follow(1, 0, 1)
    assert stage.loaded[-1] == 1


def test_engines_that_lose_a_version_as_soon_as_they_have_it_are_given_it_again(stage: Stage) -> None:
    async def twice() -> None:
        await have(lambda: len(stage.loaded) == 2)

    stage.loses_first = True
    stage.follow(0, 0, during=twice)


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("fails_first", [False, True])
def test_engines_that_lose_a_version_after_the_trainer_left_are_given_what_is_held_if_it_is_whole(
    stage: Stage, fails_first: bool, damage: bool
) -> None:
    """As when the only engine of a worker dies."""

    def lose(sync: WeightSync) -> None:
        stage.server.close()
        if damage:
            assert sync._held is not None
            held = sync._held.tensors["w"]
            held.file.chmod(0o600)
            with held.file.open("r+b") as out:
                out.seek(held.offset)
                out.write(b"\7")
        stage.fail_next = fails_first
        sync.invalidate()

    async def run() -> None:
        async with stage.following(pull_timeout_s=0.2) as sync:
            stage.announce(0)
            await have(lambda: stage.loaded)
            await asyncio.to_thread(lose, sync)
            await have(lambda: len(stage.loaded) == 2 or sync.failures == 2)

    asyncio.run(run())
    assert len(stage.loaded) == (1 if damage else 2)


def test_a_version_of_another_digest_than_announced_is_not_served(stage: Stage) -> None:
    """As when a publisher is missing from the announcement: what it lists verifies, but it is not the whole."""

    async def during() -> None:
        stage.announce(0, "0" * 32)
        await have(lambda: stage.sync.failures)
        stage.publish()
        stage.announce(1)

    stage.follow(1, during=during)
    assert stage.loaded == [1]


@pytest.mark.parametrize("is_right", [True, False])
def test_a_version_that_was_pulled_before_its_announcement_waits_for_its_digest(stage: Stage, is_right: bool) -> None:
    async def announce_the_next() -> None:
        await asyncio.sleep(0.3)
        assert stage.sync.serving == ("", -1), "what is not announced is not served"
        stage.announce(1, whole(11 if is_right else 12))
        if not is_right:
            await have(lambda: stage.sync.failures)
            stage.publish()
            stage.announce(2)

    stage.publish()
    stage.follow(1 if is_right else 2, 0, during=announce_the_next)
    assert stage.loaded == [1 if is_right else 2]


def test_a_version_announced_without_a_digest_is_refused(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    async def during() -> None:
        stage.announce(5, "", "two")
        assert not stage.sync._news.is_set(), "nothing is pulled for it"
        stage.announce(0)

    stage.follow(0, during=during)
    assert "version 5 of lineage 'two' is refused: it was announced without a digest" in caplog.text


def test_nothing_is_served_before_the_engine_has_it(stage: Stage) -> None:
    stage.fail_next = True
    stage.follow(0, 0)
    assert stage.served_while_loading == [NO_VERSION, NO_VERSION]
    assert (stage.sync.failures, stage.loaded) == (1, [0])


def test_what_is_announced_during_a_pull_that_brings_something_newer_is_not_forgotten(stage: Stage) -> None:
    """Announced 0, pulled 1, and meanwhile announced 2: once."""

    async def during() -> None:
        pull, loop = stage.sync._pull, asyncio.get_running_loop()

        def pull_and_hear(*asked: Any) -> Any:
            weights = pull(*asked)
            if weights.version == 1:
                stage.publish()
                loop.call_soon_threadsafe(stage.announce, 1)
                loop.call_soon_threadsafe(stage.announce, 2)
                time.sleep(0.1)
            return weights

        stage.sync._pull = pull_and_hear  # type: ignore[method-assign]
        stage.announce(0)

    stage.publish()
    stage.follow(2, during=during)
    assert stage.loaded == [1, 2]


def test_an_announcement_that_was_overtaken_changes_nothing(stage: Stage) -> None:
    stage.publish()
    stage.follow(1, 1, 0)
    assert (stage.loaded, stage.sync._target[1]) == ([1], 1)


def test_a_pull_that_begins_while_its_worker_leaves_does_not_keep_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, dead = stage.make_sync(60.0), ["tcp://127.0.0.1:1"]
    sync.announce("one", 0, dead, "d")
    make, is_making, may_go_on = sync._make_puller, threading.Event(), threading.Event()

    def slow_make(lineage: str, publishers: tuple[str, ...]) -> object:
        is_making.set()
        may_go_on.wait(10)
        return make(lineage, publishers)

    monkeypatch.setattr(sync, "_make_puller", slow_make)
    with ThreadPoolExecutor(1) as pool:
        pulling = pool.submit(sync._pull, "one", tuple(dead))
        is_making.wait(10)
        sync.close()
        may_go_on.set()
        with pytest.raises(SlimebusError, match="cancelled"):
            pulling.result(timeout=10)


def test_shared_memory_that_cannot_be_written_to_is_a_mistake_in_the_config(stage: Stage) -> None:
    (stage.folder / "file").touch()
    for name, why in (("none", "No such file or directory"), ("file", "Not a directory")):
        stage.folder = stage.folder / name
        with pytest.raises(ConfigError, match=f"weights_shm {stage.folder}: {why}"):
            stage.make_sync()
        stage.folder = stage.folder.parent

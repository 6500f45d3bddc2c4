"""A worker's engines follow a real weight server; the engines here only remember what they were told."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
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


class Engines:
    """Loads what it is given, unless told to fail the next time."""

    def __init__(self) -> None:
        self.loaded: list[tuple[int, float]] = []
        self.fail_next = False

    async def update_weights(self, version: SharedVersion) -> None:
        if self.fail_next:
            self.fail_next = False
            raise WeightsError("an engine would not load it")
        self.loaded.append((version.version, float(read_model(version.directory)["w"].buffer.view(np.uint16)[0])))

    async def until_ready(self) -> None:
        pass


@pytest.fixture
def store() -> Iterator[tuple[VersionStore, WeightServer]]:
    kept = VersionStore(lineage="one")
    server = WeightServer(kept)
    yield kept, server
    server.close()


def follow(tmp_path: Path, engines: Engines, during: Callable[[WeightSync], None], until: tuple[str, int]) -> WeightSync:
    """Run a WeightSync until it serves `until`; `during` is called once it runs."""
    (tmp_path / "model").mkdir(exist_ok=True)

    async def run() -> WeightSync:
        sync = WeightSync(engines, tmp_path / "model", shm=str(tmp_path), pull_timeout_s=5.0, on_change=lambda: None)  # type: ignore[arg-type]
        task = asyncio.create_task(sync.run())
        during(sync)
        async with asyncio.timeout(10):
            while sync.serving != until:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sync.close()
        return sync

    return asyncio.run(run())


def values(first: int) -> dict[str, np.ndarray]:
    return {"w": np.array([first, 2, 3], np.uint16)}


def test_an_announced_version_is_pulled_loaded_and_served(tmp_path: Path, store: tuple[VersionStore, WeightServer]) -> None:
    kept, server = store
    kept.publish(values(10))
    engines = Engines()
    sync = follow(tmp_path, engines, lambda sync: sync.announce("one", 0, [server.endpoint], whole(10)), ("one", 0))
    assert engines.loaded == [(0, 10.0)]
    assert set(sync.stage_s) == {"wire", "verify", "share", "load"}
    assert sum(sync.stage_s.values()) < sync.last_sync_s
    assert not list(tmp_path.glob("slimebus-weights-*")), "the shared memory is freed"


def test_engines_that_lose_a_version_as_soon_as_they_have_it_are_given_it_again(
    tmp_path: Path, store: tuple[VersionStore, WeightServer]
) -> None:
    kept, server = store
    kept.publish(values(10))

    class Forgetful(Engines):
        on_lost = staticmethod(lambda: None)

        async def update_weights(self, version: SharedVersion) -> None:
            await super().update_weights(version)
            if len(self.loaded) == 1:
                asyncio.get_running_loop().call_soon(self.on_lost)

    async def has_loaded_twice(engines: Engines) -> None:
        async with asyncio.timeout(10):
            while len(engines.loaded) < 2:
                await asyncio.sleep(0.01)

    async def run() -> None:
        sync = WeightSync(engines, tmp_path, shm=str(tmp_path), pull_timeout_s=5.0, on_change=lambda: None)  # type: ignore[arg-type]
        sync.announce("one", 0, [server.endpoint], whole(10))
        following = asyncio.create_task(sync.run())
        await has_loaded_twice(engines)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        sync.close()

    engines = Forgetful()
    asyncio.run(run())


@pytest.mark.parametrize("damage", [False, True])
@pytest.mark.parametrize("fails_first", [False, True])
def test_engines_that_lose_a_version_after_the_trainer_left_are_given_what_is_held_if_it_is_whole(
    tmp_path: Path, store: tuple[VersionStore, WeightServer], fails_first: bool, damage: bool
) -> None:
    """As when the only engine of a worker dies."""
    kept, server = store
    kept.publish(values(10))
    engines = Engines()

    def lose(sync: WeightSync) -> None:
        server.close()
        if damage:
            shared = sync._held
            assert shared is not None
            file = shared.tensors["w"].file
            file.chmod(0o600)
            with file.open("r+b") as out:
                out.seek(shared.tensors["w"].offset)
                out.write(b"\7")
        engines.fail_next = fails_first
        sync.invalidate()

    async def run() -> None:
        sync = WeightSync(engines, tmp_path, shm=str(tmp_path), pull_timeout_s=0.2, on_change=lambda: None)  # type: ignore[arg-type]
        following = asyncio.create_task(sync.run())
        sync.announce("one", 0, [server.endpoint], whole(10))
        async with asyncio.timeout(20):
            while not engines.loaded:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(lose, sync)
            while len(engines.loaded) < 2 and sync.failures < 2:
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        sync.close()

    asyncio.run(run())
    assert len(engines.loaded) == (1 if damage else 2)


def test_a_version_of_another_digest_than_announced_is_not_served(tmp_path: Path, store: tuple[VersionStore, WeightServer]) -> None:
    """As when a publisher is missing from the announcement: what it lists verifies, but it is not the whole."""
    kept, server = store
    first = kept.publish(values(10))
    engines = Engines()

    def during(sync: WeightSync) -> None:
        sync.announce("one", 0, [server.endpoint], "0" * 32)
        going_on.append(asyncio.create_task(publish_the_next(sync)))

    async def publish_the_next(sync: WeightSync) -> None:
        while not sync.failures:
            await asyncio.sleep(0.01)
        kept.publish(values(11))
        sync.announce("one", 1, [server.endpoint], whole(11))

    going_on: list[asyncio.Task[None]] = []
    follow(tmp_path, engines, during, ("one", 1))
    assert engines.loaded == [(1, 11.0)]
    assert first.digest != "0" * 32


@pytest.mark.parametrize("is_right", [True, False])
def test_a_version_that_was_pulled_before_its_announcement_waits_for_its_digest(
    tmp_path: Path, store: tuple[VersionStore, WeightServer], is_right: bool
) -> None:
    kept, server = store
    kept.publish(values(10))
    kept.publish(values(11))
    engines = Engines()

    async def announce_the_next(sync: WeightSync) -> None:
        await asyncio.sleep(0.3)
        assert sync.serving == ("", -1), "what is not announced is not served"
        sync.announce("one", 1, [server.endpoint], whole(11) if is_right else whole(12))
        if not is_right:
            while not sync.failures:
                await asyncio.sleep(0.01)
            kept.publish(values(12))
            sync.announce("one", 2, [server.endpoint], whole(12))

    def during(sync: WeightSync) -> None:
        sync.announce("one", 0, [server.endpoint], whole(10))
        going_on.append(asyncio.create_task(announce_the_next(sync)))

    going_on: list[asyncio.Task[None]] = []
    follow(tmp_path, engines, during, ("one", 1) if is_right else ("one", 2))
    assert engines.loaded == [(1, 11.0) if is_right else (2, 12.0)]


def test_a_version_announced_without_a_digest_is_refused(
    tmp_path: Path, store: tuple[VersionStore, WeightServer], caplog: pytest.LogCaptureFixture
) -> None:
    kept, server = store
    kept.publish(values(10))
    engines = Engines()

    def during(sync: WeightSync) -> None:
        sync.announce("two", 5, [server.endpoint], "")
        assert not sync._news.is_set(), "nothing is pulled for it"
        sync.announce("one", 0, [server.endpoint], whole(10))

    follow(tmp_path, engines, during, ("one", 0))
    assert "version 5 of lineage 'two' is refused: it was announced without a digest" in caplog.text


def whole(first: int) -> str:
    return VersionStore().publish(values(first)).digest


def test_nothing_is_served_before_the_engine_has_it(tmp_path: Path, store: tuple[VersionStore, WeightServer]) -> None:
    kept, server = store
    kept.publish(values(10))
    engines = Engines()
    engines.fail_next = True
    seen: list[int] = []
    loads = engines.update_weights

    async def spied(version: SharedVersion) -> None:
        seen.append(sync_box[0].serving[1])
        await loads(version)

    engines.update_weights = spied  # type: ignore[method-assign]
    sync_box: list[WeightSync] = []

    def during(sync: WeightSync) -> None:
        sync_box.append(sync)
        sync.announce("one", 0, [server.endpoint], whole(10))

    sync = follow(tmp_path, engines, during, ("one", 0))
    assert seen == [NO_VERSION, NO_VERSION]
    assert sync.failures == 1
    assert engines.loaded == [(0, 10.0)]


def test_a_newer_version_replaces_the_older(tmp_path: Path, store: tuple[VersionStore, WeightServer]) -> None:
    kept, server = store
    kept.publish(values(10))
    kept.publish(values(11))
    engines = Engines()

    def during(sync: WeightSync) -> None:
        sync.announce("one", 0, [server.endpoint], whole(10))
        sync.announce("one", 1, [server.endpoint], whole(11))

    follow(tmp_path, engines, during, ("one", 1))
    assert engines.loaded[-1] == (1, 11.0)


def test_what_is_announced_during_a_pull_that_brings_something_newer_is_not_forgotten(
    tmp_path: Path, store: tuple[VersionStore, WeightServer]
) -> None:
    """Announced 0, pulled 1, and meanwhile announced 2: once."""
    kept, server = store
    for first in (10, 11):
        kept.publish(values(first))
    engines = Engines()

    def during(sync: WeightSync) -> None:
        pull, loop = sync._pull, asyncio.get_running_loop()

        def pull_and_hear(*asked: Any) -> Any:
            weights = pull(*asked)
            if weights.version == 1:
                kept.publish(values(12))
                loop.call_soon_threadsafe(sync.announce, "one", 1, [server.endpoint], whole(11))
                loop.call_soon_threadsafe(sync.announce, "one", 2, [server.endpoint], whole(12))
                time.sleep(0.1)
            return weights

        sync._pull = pull_and_hear  # type: ignore[method-assign]
        sync.announce("one", 0, [server.endpoint], whole(10))

    follow(tmp_path, engines, during, ("one", 2))
    assert [version for version, _ in engines.loaded] == [1, 2]


def test_an_announcement_that_was_overtaken_changes_nothing(tmp_path: Path, store: tuple[VersionStore, WeightServer]) -> None:
    kept, server = store
    for first in (10, 11):
        kept.publish(values(first))
    engines = Engines()

    def during(sync: WeightSync) -> None:
        sync.announce("one", 1, [server.endpoint], whole(11))
        sync.announce("one", 0, [server.endpoint], whole(10))
        assert sync._target[1] == 1

    follow(tmp_path, engines, during, ("one", 1))
    assert len(engines.loaded) == 1


def test_a_pull_that_begins_while_its_worker_leaves_does_not_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = WeightSync(Engines(), tmp_path, shm=str(tmp_path), pull_timeout_s=60.0, on_change=lambda: None)  # type: ignore[arg-type]
    dead = ["tcp://127.0.0.1:1"]
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


def test_shared_memory_that_cannot_be_written_to_is_a_mistake_in_the_config(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for shm, why in ((tmp_path / "none", "No such file or directory"), (tmp_path / "file", "Not a directory")):
        with pytest.raises(ConfigError, match=f"weights_shm {shm}: {why}"):
            WeightSync(Engines(), tmp_path, shm=str(shm), pull_timeout_s=1.0, on_change=lambda: None)  # type: ignore[arg-type]

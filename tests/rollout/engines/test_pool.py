"""Engines that hang, end or are left: the others go on, and nobody else's engine stays paused. Against embedded engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tiny_model import save_model

from rollout.engines import engine_state, pool
from rollout.engines.backends import embedded_engine
from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.pool import EnginePool
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess
from rollout.samples.partials import Unfinished
from rollout.samples.response import Task
from slimebus.bus.errors import SlimebusError, UsageError, WeightsError
from slimebus.config.schema import EngineConfig, RunConfig
from slimebus.weights.host.shared_folder import SharedVersion

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
SHORT = {"temperature": 1.0, "max_new_tokens": 3, "ignore_eos": True}
LONG = {"temperature": 1.0, "max_new_tokens": 100, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, head_dim=16, tie_word_embeddings=True)
    return path


@pytest.fixture(scope="module")
def two(model: Path) -> Iterator[list[EngineProcess]]:
    """Engines that the worker did not start, with a key."""
    engines = [embedded_engine(model, model / f"engine-{i}.log", api_key="open sesame") for i in range(2)]
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.wait_ready(120))
        yield engines
    finally:
        for engine in engines:
            with contextlib.suppress(psutil.NoSuchProcess, IndexError):
                os.kill(server_of(engine), signal.SIGCONT)
            engine.stop()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "PROBE_S", 1.0)
    monkeypatch.setattr(engine_state, "SILENT_PROBES", 4)


def has_ended(pid: int) -> bool:
    """Whether it has, also where nobody has asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def task(sampling: dict[str, Any]) -> Task:
    return Task(prompt="", prompt_ids=np.array([1, 2], np.int32), sampling=sampling)


def server_of(engine: EngineProcess) -> int:
    return int(psutil.Process(engine.pid).children()[0].pid)


def version(model: Path, number: int) -> SharedVersion:
    return SharedVersion(lineage="L", version=number, digest="", directory=model, tensors={})


def run(model: Path, talk: Callable[[Dispatch], Any], **config: Any) -> Any:
    """talk: with a dispatch whose pool serves version 1."""

    async def session() -> Any:
        engines = EnginePool(RunConfig(engine=EngineConfig(**config)), model, model, name="w")
        try:
            await engines.start()
            await engines.update_weights(version(model, 1))
            return await asyncio.wait_for(talk(Dispatch(engines)), 90)
        finally:
            await engines.stop()

    return asyncio.run(session())


def attached(two: list[EngineProcess]) -> dict[str, Any]:
    return {"engine_url": [engine.url for engine in two], "engine_api_key": "open sesame"}


async def until(is_so: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_so():
            await asyncio.sleep(0.005)


def test_an_attached_engine_that_hangs_is_out_of_service_while_the_other_goes_on_and_comes_back(model: Path, two: list[EngineProcess]):
    async def talk(engines: Dispatch) -> None:
        first, second = engines.pool.engines
        begun = [asyncio.ensure_future(engines.sample([task(LONG)])) for _ in range(4)]
        await asyncio.sleep(0.05)
        os.kill(server_of(two[0]), signal.SIGSTOP)
        start = time.monotonic()
        await engines.pool.update_weights(version(model, 2))
        assert time.monotonic() - start < 15, "the other one does not wait for the hanging one's deadline"
        assert (first.state.phase, second.state.phase, second.state.version) == ("sick", "serving", "L:2")
        for _ in range(3):
            await asyncio.wait_for(engines.sample([task(SHORT)]), 10)
        outcomes = await asyncio.wait_for(asyncio.gather(*begun, return_exceptions=True), 30)
        assert all(isinstance(outcome, list) or (isinstance(outcome, SlimebusError) and outcome.retryable) for outcome in outcomes)
        os.kill(server_of(two[0]), signal.SIGCONT)
        await until(lambda: first.state.version == "L:2", 30)

    try:
        run(model, talk, **attached(two))
    finally:
        os.kill(server_of(two[0]), signal.SIGCONT)


def test_an_engine_that_is_gone_is_asked_once_a_second_and_not_without_end(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "PROBE_PAUSE_S", 0.1)
    asked, lost = [], []

    class Gone(EngineClient):
        async def answers(self, timeout_s: float, *, generates: bool) -> bool:
            asked.append(timeout_s)
            return False

    async def watch() -> None:
        engines = EnginePool(RunConfig(), model, model, name="w")
        engine = Engine("http://127.0.0.1:9", None, None, EngineConfig())
        engine.client, engines.on_lost = Gone(engine.url), lambda: lost.append(1)  # type: ignore[assignment]
        engines.add(engine)
        engine.state.phase = "serving"
        watching = asyncio.create_task(engines._monitor(engine))
        await asyncio.sleep(1)
        watching.cancel()
        assert engine.state.phase == "sick"

    asyncio.run(watch())
    assert 4 <= len(asked) <= 11
    assert lost == [1]


def test_an_engine_of_ours_that_hangs_is_killed_and_replaced(model: Path):
    async def talk(engines: Dispatch) -> None:
        (engine,) = engines.pool.engines
        assert engine.process is not None
        hung = server_of(engine.process)
        os.kill(hung, signal.SIGSTOP)
        await until(lambda: engine.state.phase == "starting", 20)
        await engines.pool.until_ready()
        await engines.pool.update_weights(version(model, 2))
        (response,) = await engines.sample([task(SHORT)])
        assert response.versions == [(2, 3)]
        await until(lambda: has_ended(hung), 20)

    run(model, talk)


def test_a_worker_that_leaves_in_the_middle_of_an_update_leaves_no_attached_engine_paused(
    model: Path, two: list[EngineProcess], monkeypatch: pytest.MonkeyPatch
):
    async def talk(engines: Dispatch) -> None:
        hangs = asyncio.Event()

        async def hang(*_: Any, **__: Any) -> None:
            hangs.set()
            await asyncio.sleep(60)

        for engine in engines.pool.engines:
            monkeypatch.setattr(engine.client, "update_weights_from_disk", hang)
        update = asyncio.ensure_future(engines.pool.update_weights(version(model, 3)))
        await hangs.wait()
        begun = time.monotonic()
        await engines.pool.finish_loads()
        update.cancel()
        await asyncio.gather(update, return_exceptions=True)
        await engines.pool.leave()
        assert time.monotonic() - begun < 3
        for process in two:
            async with EngineClient(process.url, api_key="open sesame") as client:
                assert await client.is_ready()

    run(model, talk, **attached(two))


def test_refused_weights_are_served_by_nobody_and_what_was_running_is_given_back(model: Path, two: list[EngineProcess], tmp_path: Path):
    shutil.copytree(model, tmp_path / "torn")
    whole = (model / "model.safetensors").read_bytes()
    (tmp_path / "torn" / "model.safetensors").write_bytes(whole[: len(whole) // 2])

    async def talk(engines: Dispatch) -> None:
        (engine,) = engines.pool.engines
        running = asyncio.ensure_future(engines.sample([task(LONG)]))
        await until(lambda: engine.running == 1, 10)
        with pytest.raises(WeightsError, match="not a whole safetensors file"):
            await engines.pool.update_weights(version(tmp_path / "torn", 2))
        with pytest.raises(WeightsError, match="the group is given back"):
            await running
        assert (engine.report().state, engine.report().version) == ("sick", -1)
        with pytest.raises(WeightsError, match="out of service"):
            await engines.sample([task(SHORT)])
        await engines.pool.update_weights(version(model, 3))
        (response,) = await engines.sample([task(SHORT)])
        assert (response.versions, engine.report().state, engine.report().version) == ([(3, 3)], "serving", 3)

    run(model, talk, **attached(two[:1]))


def test_an_engine_of_ours_answers_only_who_has_its_key_and_ps_does_not_show_it(model: Path):
    async def talk(engines: Dispatch) -> None:
        (engine,) = engines.pool.engines
        assert engine.process is not None
        assert len(engine.process.api_key) >= 32
        assert engine.process.api_key not in subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
        for key in ("", "wrong", "é"):
            async with EngineClient(engine.url, api_key=key, retry_s=0) as stranger:
                with pytest.raises(UsageError, match="401"):
                    await stranger.generate([[1]], SHORT, ["x"])
                with pytest.raises(UsageError, match="401"):
                    await stranger.pause()
                assert await stranger.answers(5)

    run(model, talk)


def test_a_wrong_key_of_an_attached_engine_is_said_at_once(model: Path, two: list[EngineProcess]):
    with pytest.raises(UsageError, match=r"asks for a key .* set engine.engine_api_key"):
        run(model, lambda engines: asyncio.sleep(0), engine_url=[two[0].url], engine_api_key="sesame")


def test_engine_urls_may_be_repeated_and_listed():
    show = [sys.executable, "-m", "slimebus", "config", "show", "--engine-url", "http://a:1,http://b:2", "--engine-url", "http://c:3"]
    shown = subprocess.run(show, capture_output=True, text=True, check=False)
    assert all(url in shown.stdout for url in ("http://a:1", "http://b:2", "http://c:3")), shown.stdout + shown.stderr


def test_a_router_asks_only_engines_that_serve_and_a_killed_one_costs_no_truncated_sample(model: Path):
    async def talk(engines: Dispatch) -> None:
        first, router = engines.pool.engines[0], engines.pool.router
        assert router is not None
        await engines.pool.update_weights(version(model, 2))
        (response,) = await engines.sample([task(SHORT)])
        assert response.versions == [(2, 3)]
        begun = [asyncio.ensure_future(engines.sample([task(LONG)])) for _ in range(6)]
        await until(lambda: router.target.running == 6, 10)
        assert first.process is not None
        os.kill(server_of(first.process), signal.SIGKILL)
        for outcome in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(outcome, list):
                assert len(outcome[0].token_ids) == LONG["max_new_tokens"]
            else:
                assert isinstance(outcome, SlimebusError), outcome
        await until(lambda: [engine.state.phase for engine in engines.pool.engines] == ["serving", "serving"], 60)
        assert first.state.version == "L:2"
        cut_off = asyncio.ensure_future(engines.sample([task(LONG)]))
        await until(lambda: router.target.running == 1, 10)
        await engines.leave()
        with pytest.raises(Unfinished):
            await cut_off

    run(model, talk, num_engines=2, use_router=True)


def test_a_frozen_model_is_served_beside_the_policy_and_gets_no_weights(model: Path):
    file = model / "models.yaml"
    file.write_text(
        "sglang: [{name: actor, server_groups: [{num_gpus: 1}]}, "
        f"{{name: judge, model_path: {model}, update_weights: false, server_groups: [{{num_gpus: 1}}]}}]"
    )

    async def talk(engines: Dispatch) -> None:
        await engines.pool.update_weights(version(model, 2))
        actor, judge = engines.pool.engines
        assert [(engine.state.model, engine.state.phase) for engine in (actor, judge)] == [("actor", "serving"), ("judge", "serving")]
        assert (await actor.client.weight_version(), await judge.client.weight_version()) == ("L:2", "default")
        (completion,) = await engines.generate([[1, 2]], [SHORT], model="judge")
        assert engines.version_runs(completion, is_frozen=True) == [(-1, 3)]
        assert (await engines.sample([task(SHORT)]))[0].versions == [(2, 3)]

    run(model, talk, sglang_config=str(file))

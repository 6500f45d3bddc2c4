"""The real SGLang takes deltas while it generates, by every route and pause mode, and ends with exactly the trainer's weights.

Needs .venv-sglang (bin/install-sglang), or SLIMEBUS_SGLANG_PYTHON with a python that has SGLang.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import write_model
from tiny_model import save_served, sglang_python

from rollout.engines.dispatch import Dispatch
from rollout.engines.pool import EnginePool
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import READY_TIMEOUT_S, EngineProcess, sglang_server
from rollout.samples.response import Response, Task
from rollout.weights.sync import WeightSync
from slimebus.bus.errors import WeightsError
from slimebus.config.schema import EngineConfig, RunConfig
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.store.server import WeightServer
from slimebus.weights.store.version_store import VersionStore
from slimebus.weights.tensors import Tensor

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(900)]

LINEAGE, NUM_DELTAS = "5f1c9a", 10
PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44, 45, 46], [300], list(range(20, 120))]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True}
LAYER = "model.layers.0.self_attn."


class Trainer:
    """Publishes versions of the model in `path`; each step changes some values of two tensors in three."""

    def __init__(self, path: Path) -> None:
        self.tensors = {name: tensor.steps.reshape(tensor.shape).copy() for name, tensor in read_model(path).items()}
        self.store = VersionStore(keep=16, lineage=LINEAGE, first_version=0)
        self.server = WeightServer(self.store, "tcp://127.0.0.1:0")
        self.random = np.random.default_rng(0)
        self.publish()

    def publish(self) -> int:
        self.version = int(self.store.publish(self.tensors).version)
        return self.version

    def change(self, name: str, fraction: float = 0.3) -> None:
        values = self.tensors[name].copy()
        values[self.random.random(values.shape) < fraction] ^= 1 << 6  # a large step of the mantissa: answers must change
        self.tensors[name] = values

    def step(self) -> int:
        for i, name in enumerate(self.tensors):
            if (i + self.version) % 3 and not name.endswith("norm.weight"):
                self.change(name)
        return self.publish()

    def save(self, path: Path, config_from: Path) -> Path:
        tensors = {name: Tensor("bfloat16", values.shape, values.reshape(-1).view(np.uint8)) for name, values in self.tensors.items()}
        write_model(path, tensors, config_from=config_from)
        return path


def task(prompt: list[int], sampling: dict[str, Any]) -> Task:
    return Task(prompt="", prompt_ids=np.array(prompt, np.int32), sampling=sampling)


class Worker:
    """The engines of a worker and what keeps them on the newest version."""

    def __init__(self, engines: EnginePool, sync: WeightSync, trainer: Trainer) -> None:
        self.engines, self.sync, self.trainer = engines, sync, trainer
        self.dispatch = Dispatch(engines)

    @property
    def weights(self) -> Any:
        return self.engines.engines[0].client

    async def follow(self, version: int) -> None:
        self.sync.announce(LINEAGE, version, [self.trainer.server.endpoint], self.trainer.store.newest.digest)
        async with asyncio.timeout(120):
            while self.sync.serving != (LINEAGE, version):
                await asyncio.sleep(0.01)

    async def greedy(self) -> list[list[int]]:
        answers = [await self.dispatch.sample([task(prompt, GREEDY)]) for prompt in PROMPTS]
        return [answer[0].token_ids.tolist() for answer in answers]

    async def cached_tokens(self, prompt: list[int]) -> int:
        """Of the prompt, sent as the worker sends it."""
        body = {"input_ids": prompt, "sampling_params": GREEDY, "extra_key": self.engines.engines[0].state.version}
        answer = json.loads(await self.engines.engines[0].client.post_once("/generate", body))
        return int(answer["meta_info"]["cached_tokens"])

    async def sample_forever(self, number: int, made: list[Response]) -> None:
        prompt = np.array([*range(5, 60), number], np.int32)
        while True:
            made += await self.dispatch.sample([Task(prompt="", prompt_ids=prompt, sampling=LONG, group=f"0/{number}", index=0)])


@asynccontextmanager
async def worker(server: EngineProcess, model: Path, trainer: Trainer, **config: Any) -> AsyncIterator[Worker]:
    engine_config = EngineConfig(engine="sglang", engine_url=[server.url], **{"weight_route": "broadcast"} | config)
    engines = EnginePool(RunConfig(engine=engine_config), model, model.parent, name="w")
    await engines.start()
    sync = WeightSync(engines, model, shm="/dev/shm", pull_timeout_s=60, on_change=lambda: None)
    following = asyncio.create_task(sync.run())
    try:
        yield Worker(engines, sync, trainer)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        sync.close()
        await engines.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sglang_python()
    path = tmp_path_factory.mktemp("model") / "model"
    save_served(path)
    return path


def started(model: Path, log: Path) -> EngineProcess:
    process = sglang_server(model, log, python=sglang_python(), on_cpu=True)
    process.start()
    asyncio.run(process.wait_ready(READY_TIMEOUT_S))
    return process


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[EngineProcess]:
    process = started(model, model.parent / "engine.log")
    yield process
    process.stop()


@pytest.fixture
def trainer(model: Path) -> Iterator[Trainer]:
    made = Trainer(model)
    yield made
    made.server.close()


def check_versions(made: list[Response]) -> None:
    """Every token has a version, and versions only rise."""
    for response in made:
        versions = [version for version, _ in response.versions]
        assert sum(length for _, length in response.versions) == len(response.token_ids) == len(response.logprobs) == 400
        assert versions == sorted(set(versions))


async def take_deltas(at: Worker, num_deltas: int) -> list[Response]:
    """The versions one after another while eight requests run at any time."""
    made: list[Response] = []
    await at.follow(at.trainer.version)
    sampling = [asyncio.create_task(at.sample_forever(number, made)) for number in range(8)]
    try:
        for _ in range(num_deltas):
            await asyncio.sleep(0.2)
            await at.follow(at.trainer.step())
        while not made:
            ended, _ = await asyncio.wait(sampling, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            assert not ended, [task.exception() for task in ended]
    finally:
        for task in sampling:
            task.cancel()
        outcomes = await asyncio.gather(*sampling, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    check_versions(made)
    return made


def test_ten_deltas_in_a_row_while_it_generates_leave_exactly_the_final_weights(
    server: EngineProcess, model: Path, trainer: Trainer, tmp_path: Path
) -> None:
    async def run() -> tuple[list[list[int]], list[list[int]]]:
        async with worker(server, model, trainer) as at:
            await at.follow(0)
            first, sent = await at.greedy(), at.weights.sent_tensors
            assert sent == len(trainer.tensors)
            made = await take_deltas(at, NUM_DELTAS)
            assert max(len(response.versions) for response in made) > 1  # some ran across an update
            assert at.weights.sent_tensors - sent < NUM_DELTAS * len(trainer.tensors) * 0.6  # norms and every third tensor stayed
            return first, await at.greedy()

    first, last = asyncio.run(run())
    assert first != last
    fresh = started(trainer.save(tmp_path / "final", model), tmp_path / "fresh.log")
    try:

        async def ask() -> list[list[int]]:
            engines = EnginePool(RunConfig(engine=EngineConfig(engine="sglang", engine_url=[fresh.url])), model, tmp_path, name="f")
            await engines.start()
            try:
                post = engines.engines[0].client.post_once
                bodies = [{"input_ids": prompt, "sampling_params": GREEDY} for prompt in PROMPTS]
                return [json.loads(await post("/generate", body))["output_ids"] for body in bodies]
            finally:
                await engines.stop()

        assert asyncio.run(ask()) == last
    finally:
        fresh.stop()


@pytest.mark.parametrize("pause_mode", ["retract", "abort", "in_place"])
@pytest.mark.parametrize("weight_route", ["broadcast", "disk"])
def test_each_route_and_pause_mode_ends_with_the_same_weights(
    server: EngineProcess, model: Path, trainer: Trainer, pause_mode: str, weight_route: str
) -> None:
    async def run() -> None:
        async with worker(server, model, trainer, pause_mode=pause_mode, weight_route=weight_route) as at:
            await take_deltas(at, 2)
            await check_is_same(at, trainer)

    asyncio.run(run())


async def check_is_same(at: Worker, trainer: Trainer) -> None:
    """The engine's own checksums are those that it has after it loaded the trainer's newest version from a directory."""
    client, model = at.engines.engines[0].client, at.engines.model_dir
    assert await client.weight_version() == f"{LINEAGE}:{trainer.version}"
    before = await checksums(client)
    saved = trainer.save(model.parent / f"saved-{id(trainer)}", model)
    await client.update_weights_from_disk(str(saved), f"{LINEAGE}:{trainer.version}")
    assert before == await checksums(client)


async def checksums(client: EngineClient) -> Any:
    """Of the tensors of each rank."""
    return json.loads(await client.post_once("/weights_checker", {"action": "checksum"}))["ranks"]


def test_one_changed_shard_of_a_fused_parameter_is_all_that_is_sent(server: EngineProcess, model: Path, trainer: Trainer) -> None:
    async def run() -> None:
        async with worker(server, model, trainer) as at:
            await at.follow(0)
            tensors, size = at.weights.sent_tensors, at.weights.sent_bytes
            trainer.change(LAYER + "q_proj.weight")
            await at.follow(trainer.publish())
            assert (at.weights.sent_tensors - tensors, at.weights.sent_bytes - size) == (1, 128 * 128 * 2)
            await check_is_same(at, trainer)

    asyncio.run(run())


def test_a_prompt_sampled_after_an_update_reuses_nothing_that_old_weights_computed(
    server: EngineProcess, model: Path, trainer: Trainer
) -> None:
    async def run() -> None:
        async with worker(server, model, trainer, pause_mode="in_place") as at:
            await at.follow(0)
            found = [await at.cached_tokens(PROMPTS[3]) for _ in range(2)]
            await at.follow(trainer.step())
            found += [await at.cached_tokens(PROMPTS[3]) for _ in range(2)]
            assert found == [0, len(PROMPTS[3]) - 1] * 2

    asyncio.run(run())


def test_an_engine_that_somebody_else_updated_gets_everything_again(server: EngineProcess, model: Path, trainer: Trainer) -> None:
    async def run() -> None:
        async with worker(server, model, trainer) as at:
            await at.follow(0)
            sent = at.weights.sent_tensors
            client = at.engines.engines[0].client
            await client.post_once("/update_weight_version", {"new_version": "someone-elses", "abort_all_requests": False})
            await at.follow(trainer.step())
            assert at.weights.sent_tensors - sent == len(trainer.tensors)
            await check_is_same(at, trainer)

    asyncio.run(run())


def test_a_tensor_of_another_shape_never_reaches_the_engine(server: EngineProcess, model: Path, trainer: Trainer) -> None:
    async def run() -> None:
        async with worker(server, model, trainer) as at:
            await at.follow(0)
            name = LAYER + "q_proj.weight"
            trainer.tensors[name] = trainer.tensors[name][:64]
            at.sync.announce(LINEAGE, trainer.publish(), [trainer.server.endpoint], trainer.store.newest.digest)
            while not at.sync.failures:
                await asyncio.sleep(0.05)
            assert at.sync.serving[1] == -1
            assert await at.engines.engines[0].client.weight_version() == f"{LINEAGE}:0"

    asyncio.run(run())


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_an_update_that_ends_half_way_leaves_the_engine_paused_until_it_has_everything(
    server: EngineProcess, model: Path, trainer: Trainer, pause_mode: str
) -> None:
    async def run() -> None:
        async with worker(server, model, trainer, pause_mode=pause_mode) as at:
            await at.follow(0)
            engine, sent = at.engines.engines[0], at.weights.sent_tensors
            end, paused = engine.client.calls.end, []

            async def fails_once() -> None:
                engine.client.calls.end = closes  # type: ignore[method-assign]
                raise WeightsError("the connection was lost before the end")

            async def closes() -> None:
                paused.append(not await engine.client.is_ready())
                await end()

            engine.client.calls.end = fails_once  # type: ignore[method-assign]
            running = asyncio.create_task(at.dispatch.sample([task([5, 6], {**LONG, "max_new_tokens": 1500})]))
            await asyncio.sleep(0.3)
            version = trainer.step()
            at.sync.announce(LINEAGE, version, [trainer.server.endpoint], trainer.store.newest.digest)
            with pytest.raises(WeightsError, match="out of service"):
                await asyncio.wait_for(running, 60)
            assert not await engine.client.is_ready()
            changed = at.weights.sent_tensors - sent
            await at.follow(version)
            assert paused[0]
            assert at.weights.sent_tensors - sent - changed == len(trainer.tensors) > changed
            await check_is_same(at, trainer)
            assert len(await at.greedy()) == len(PROMPTS)

    asyncio.run(run())


def test_an_engine_killed_in_the_middle_of_an_update_is_out_of_service_until_it_has_everything(model: Path, trainer: Trainer) -> None:
    async def run() -> None:
        config = EngineConfig(engine="sglang", engine_python=sglang_python(), weight_route="broadcast")
        engines = EnginePool(RunConfig(engine=config), model, model.parent, name="killed")
        await engines.start()
        sync = WeightSync(engines, model, shm="/dev/shm", pull_timeout_s=60, on_change=lambda: None)
        following = asyncio.create_task(sync.run())
        try:
            at = Worker(engines, sync, trainer)
            await at.follow(0)
            engine, before = engines.engines[0], engines.engines[0].process
            running = asyncio.create_task(at.dispatch.sample([task([5, 6], {**LONG, "max_new_tokens": 1500})]))
            receive = engine.client.calls.receive

            async def killed(*args: Any) -> None:
                assert engine.process is not None
                assert engine.process.pid is not None
                os.kill(engine.process.pid, signal.SIGKILL)
                while not engine.is_dead:
                    await asyncio.sleep(0.05)
                await receive(*args)

            engine.client.calls.receive = killed  # type: ignore[method-assign]
            version = trainer.step()
            sync.announce(LINEAGE, version, [trainer.server.endpoint], trainer.store.newest.digest)
            with pytest.raises(WeightsError, match="out of service"):
                await asyncio.wait_for(running, 60)
            assert sync.serving[1] == -1
            while sync.serving != (LINEAGE, version):
                await asyncio.sleep(0.1)
            assert engine.process is not before
            assert at.weights.sent_tensors == len(trainer.tensors)
            await check_is_same(at, trainer)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            sync.close()
            await engines.stop()

    asyncio.run(run())

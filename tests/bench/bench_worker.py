"""What a worker adds to its engine: samples from lease to put beside a bare HTTP client, and tokens that weight updates cost."""

import asyncio
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from bench_engine import prompt, sampling, served
from bench_row import Row, row
from bench_serving import change, followed
from live_broker import LiveBroker
from scripted import WeightTrainer

from rollout.engines.dispatch import Dispatch
from rollout.engines.pool import EnginePool
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess
from slimebus.config.schema import EngineConfig, RunConfig
from slimebus.weights.host.safetensors_file import read_model

CONCURRENT = (16, 64)
GROUP_SIZE, NEW_TOKENS = 8, 64
UPDATE_EVERY_S = 2.0
START_S = 120.0


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """As bits of bfloat16."""
    return {name: tensor.steps.reshape(tensor.shape).copy() for name, tensor in read_model(path).items()}


def worker_ratio(quick: bool) -> list[Row]:
    """Samples a second of a real worker and broker, beside a client that only asks the same engine for them, in turns."""
    window_s, repeats = (3.0, 1) if quick else (8.0, 3)
    found = []
    for count in CONCURRENT:
        with served() as (path, engine), worker(path, engine, count) as samples_made:
            pairs = []
            for _ in range(repeats):
                made = samples_made(window_s, is_on=True)
                samples_made(0.0, is_on=False)
                pairs.append((made, asyncio.run(bare(path, engine, count, window_s))))
        ours, theirs = max(made for made, _ in pairs), max(asked for _, asked in pairs)
        found.append(row(f"worker_ratio_embedded_{count}", ours, f"samples/s, {count} at once, lease to put", theirs, ">= 0.95"))
    return found


async def bare(path: Path, engine: EngineProcess, count: int, window_s: float) -> float:
    """Samples a second of so many at once, a group in one request as the worker asks."""
    from transformers import AutoTokenizer

    tokenizer, done, names = AutoTokenizer.from_pretrained(path), 0, itertools.count()
    end = time.monotonic() + window_s

    async def ask(client: EngineClient) -> None:
        nonlocal done
        while time.monotonic() < end:
            number = next(names)
            ids, rids = tokenizer.encode(f"p{number % 1000}"), [f"bare-{number}-{i}" for i in range(GROUP_SIZE)]
            await client.generate([ids] * GROUP_SIZE, {"temperature": 1.0, "max_new_tokens": NEW_TOKENS}, rids)
            done += GROUP_SIZE * (time.monotonic() < end)

    async with EngineClient(engine.url) as client:
        await asyncio.gather(*(ask(client) for _ in range(count // GROUP_SIZE)))
    return done / window_s


@contextmanager
def worker(path: Path, engine: EngineProcess, count: int) -> Iterator[Any]:
    """A worker on this engine, with a trainer that only publishes: a function that gives its samples a second, and pauses it."""
    sections: dict[str, dict[str, Any]] = {
        "broker": {"max_staleness": math.inf, "buffer_capacity": 1 << 20, "heartbeat_s": 0.2, "batch_tokens": 0},
        "model": {"hf_checkpoint": str(path)},
        "engine": {"engine_url": [engine.url]},
        "rollout": {
            "num_rollout": 1 << 20,
            "rollout_batch_size": 8,
            "n_samples_per_prompt": GROUP_SIZE,
            "rollout_max_response_len": NEW_TOKENS,
            "rm_type": "random",
            "max_running_groups": count // GROUP_SIZE,
        },
    }
    with tempfile.TemporaryDirectory() as folder, LiveBroker(Path(folder), num_prompts=1000, **sections) as broker:
        trainer = WeightTrainer(broker.client("trainer", "trainer"))
        trainer.publish(tensors_of(path))
        process = broker.start_beside("-m", "slimebus", "rollout", str(broker.file), "--broker", broker.address, "--worker-name", "w")

        def samples() -> float:
            clients = {client["name"]: client for client in broker.status()["clients"]}
            return clients.get("w", {}).get("metrics", {}).get("samples", 0.0)

        def samples_made(window_s: float, *, is_on: bool) -> float:
            if not is_on:
                psutil.Process(process.pid).suspend()
                time.sleep(1.0)  # what the engine still has of it
                return 0.0
            psutil.Process(process.pid).resume()
            deadline, before = time.monotonic() + START_S, samples()
            while samples() <= before:
                assert time.monotonic() < deadline, (Path(folder) / "broker.log").read_text()[-2000:]
                time.sleep(0.05)
            time.sleep(1.0)
            started, first = time.monotonic(), samples()
            time.sleep(window_s)
            return (samples() - first) / (time.monotonic() - started)

        yield samples_made
        trainer.server.close()


def update_loss(quick: bool) -> list[Row]:
    """Tokens a second of 16 requests at once with an update every 2 s, beside none, in turns."""
    with served() as (path, engine):
        still, updated = asyncio.run(speeds_of(path, engine, 1 if quick else 3, 4.0 if quick else 10.0))
    return [row("update_loss", 1 - updated / still, f"of {still:.0f} tokens/s, one update each 2 s", 0.05, "<= 1")]


async def speeds_of(path: Path, engine: EngineProcess, repeats: int, window_s: float) -> tuple[float, float]:
    """Tokens a second: without updates, with."""
    pool = EnginePool(RunConfig(engine=EngineConfig(engine_url=[engine.url])), path, path, name="bench")
    dispatch, tensors = Dispatch(pool), tensors_of(path)
    steps = change(tensors)

    async def load(number: int) -> None:
        for again in itertools.count():
            await dispatch.generate([prompt(f"{number} {again}", 16)], [sampling(128)])

    async with followed(pool, path, "/dev/shm") as publish, asyncio.TaskGroup() as group:

        async def measure(*, is_updated: bool) -> float:
            started, before = time.monotonic(), dispatch.tokens_made
            while (left_s := started + window_s - time.monotonic()) > 0:
                begun = time.monotonic()
                if is_updated:
                    next(steps)
                    await publish(tensors)
                await asyncio.sleep(max(0.0, min(left_s, begun + UPDATE_EVERY_S - time.monotonic())))
            return (dispatch.tokens_made - before) / (time.monotonic() - started)

        await publish(tensors)
        loads = [group.create_task(load(number)) for number in range(16)]
        await measure(is_updated=True)
        pairs = [(await measure(is_updated=False), await measure(is_updated=True)) for _ in range(repeats)]
        for one in loads:
            one.cancel()
    return max(still for still, _ in pairs), max(updated for _, updated in pairs)

"""What it costs the worker's event loop that many requests wait for room at an engine: a row for a crowd in front of one engine."""

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_row import Row, within

from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.pool import EnginePool
from rollout.samples.response import Completion
from slimebus.config.schema import EngineConfig, RunConfig

WAITING, LIMIT = 2048, 512
ENDINGS = 50
"""A second, so that 512 requests run for ten seconds each."""
MOST_SHARE = 0.05
ANSWER = Completion(np.array([7], np.int32), np.zeros(1, np.float32), "stop", [("L:1", 0, 1)])


class Client:
    """Holds requests until they are ended, the oldest first."""

    def __init__(self) -> None:
        self.held: list[asyncio.Future[None]] = []

    async def generate(self, prompts: list[Any], samplings: list[Any], rids: list[str], **_: str) -> list[Completion]:
        self.held.append(asyncio.get_running_loop().create_future())
        await self.held[-1]
        return [ANSWER] * len(prompts)

    async def abort(self, rid: str) -> None:
        """It ends with its future."""


def dispatch_2048(quick: bool) -> list[Row]:
    """The share of a loop's time that 50 endings a second take while 2,048 requests of as many groups wait."""
    share = asyncio.run(measure(20 if quick else 200))
    return [within("dispatch_2048", share, "share of the worker's loop", "<=", MOST_SHARE)]


async def measure(endings: int) -> float:
    """CPU seconds of one ending, as each of the requests that wait has seen it, times the endings of a second."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"vocab_size": 100}))
        pool = EnginePool(RunConfig(engine=EngineConfig(sglang_server_concurrency=LIMIT)), Path(folder), Path(folder), name="w")
    engine = Engine("http://e", None, 100, pool.config.engine)
    engine.client = client = Client()  # type: ignore[assignment]
    engine.state.phase, pool.lineage = "serving", "L"
    pool.add(engine)
    dispatch = Dispatch(pool)
    begun = [asyncio.create_task(dispatch.generate([[1]], [{}], group=f"0/{i}")) for i in range(WAITING + LIMIT)]
    while len(client.held) < LIMIT:
        await asyncio.sleep(0)
    started = time.process_time()
    for number in range(endings):
        client.held[number].set_result(None)
        while len(client.held) <= LIMIT + number:
            await asyncio.sleep(0)
    took_s = time.process_time() - started
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)
    return ENDINGS * took_s / endings

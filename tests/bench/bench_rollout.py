"""`bin/bench rollout`: how fast samples are made, what a worker and its endpoint add, and what many waiting requests cost."""

import asyncio
import json
import statistics
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import bench_engine
import bench_worker
import numpy as np
from bench_engine import VOCAB_SIZE, sampling, served
from bench_row import Row, within

from rollout.endpoint.server import Endpoint
from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.pool import EnginePool
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess
from rollout.samples.response import Completion, Response, Task
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from slimebus.config.schema import EngineConfig, RunConfig


def rows(quick: bool) -> list[Row]:
    """All rows, in order; quick: with less work."""
    engine = (bench_engine.against_transformers, bench_engine.against_sglang, bench_engine.prefill_reuse)
    return list(
        chain.from_iterable(
            m(quick) for m in (*engine, session_overhead, bench_worker.worker_ratio, bench_worker.update_loss, dispatch_2048)
        )
    )


# --- a turn through the OpenAI endpoint, beyond the engine's own time: HTTP, JSON, the chat template, the session's record ---

TURNS, ANSWER_TOKENS = 10, 32
MOST_MS = 3.0
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


class Timed:
    """An engine, and the seconds that its last request took."""

    def __init__(self, client: EngineClient) -> None:
        self.client, self.took_s = client, 0.0

    async def sample(self, tasks: list[Task], begun: Any = None) -> list[Response]:
        started = time.perf_counter()
        (made,) = await self.client.generate([tasks[0].prompt_ids.tolist()], tasks[0].sampling, [str(started)])
        self.took_s = time.perf_counter() - started
        return [Response(task=tasks[0], token_ids=made.output_ids, logprobs=made.logprobs, versions=[(0, len(made.output_ids))], text="")]


def session_overhead(quick: bool) -> list[Row]:
    """The median over conversations of ten turns, one at a time."""
    with served() as (path, engine):
        overheads = asyncio.run(measure_turns(path, engine, 2 if quick else 10))
    return [within("session_overhead", 1000 * statistics.median(overheads), "ms a turn beyond the engine's own time", "<=", MOST_MS)]


async def measure_turns(path: Path, engine: EngineProcess, conversations: int) -> list[float]:
    """Seconds of each turn but those of the first conversation, which warms up."""
    config = path / "tokenizer_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE})
    )
    tokenizer, endpoint, found = Tokenizer(path, apply_chat_template=True), Endpoint(), []
    await endpoint.start("127.0.0.1", 0)
    async with EngineClient(engine.url, vocab_size=VOCAB_SIZE) as client, aiohttp.ClientSession() as http:
        for _ in range(conversations + 1):
            timed, messages = Timed(client), [{"role": "user", "content": "begin"}]
            task = Task(prompt=messages, prompt_ids=tokenizer.encode_prompt(messages), sampling=sampling(ANSWER_TOKENS))
            slot = endpoint.open(Session(task, timed, tokenizer))  # type: ignore[arg-type]
            for turn in range(TURNS):
                started = time.perf_counter()
                url, headers = f"{endpoint.base_url}/chat/completions", {"Authorization": f"Bearer {slot.name}"}
                async with http.post(url, json={"model": "x", "messages": messages, "logprobs": True}, headers=headers) as response:
                    answer = await response.json()
                found.append(time.perf_counter() - started - timed.took_s)
                messages += [answer["choices"][0]["message"], {"role": "user", "content": f"go on {turn}"}]
            assert len(slot.session.responses()) == 1
            endpoint.release(slot)
    await endpoint.close()
    return found[TURNS:]


# --- the worker's event loop, while many requests wait for room at an engine ---

WAITING, LIMIT = 2048, 512
ENDINGS = 50
"""A second, so that 512 requests run for ten seconds each."""
MOST_LOOP_SHARE = 0.05
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
    share = asyncio.run(measure_endings(20 if quick else 200))
    return [within("dispatch_2048", share, "share of the worker's loop", "<=", MOST_LOOP_SHARE)]


async def measure_endings(endings: int) -> float:
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

"""What a turn through the OpenAI endpoint takes beyond the engine's own time: HTTP, JSON, the chat template, the session's record."""

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import aiohttp
from bench_engine import VOCAB_SIZE, sampling, served
from bench_row import Row, within

from rollout.endpoint.server import Endpoint
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess
from rollout.samples.response import Response, Task
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer

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
        overheads = asyncio.run(measure(path, engine, 2 if quick else 10))
    return [within("session_overhead", 1000 * statistics.median(overheads), "ms a turn beyond the engine's own time", "<=", MOST_MS)]


async def measure(path: Path, engine: EngineProcess, conversations: int) -> list[float]:
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

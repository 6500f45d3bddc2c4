"""The embedded engine, over HTTP and with logprobs, beside transformers and the real SGLang on the same model; one thread each.

The model is the quick start's in shape, with a vocabulary of 512 and untied embeddings, which SGLang takes on a CPU too.
"""

import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench_row import Row, absent, row
from slimebus_command import ROOT
from tiny_model import save_served

from rollout.engines.backends import embedded_engine
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess

VOCAB_SIZE = 512
NUM_MIXED = 16
CONCURRENT = (1, 4, 16)
TURNS, TURN_TOKENS, ANSWER_TOKENS = 10, 40, 24


def prompt(seed: str, length: int) -> list[int]:
    """Token ids that no other seed has."""
    chance = random.Random(seed)
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(length)]


def sampling(num_tokens: int) -> dict[str, Any]:
    """So many tokens, at temperature 1."""
    return {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}


@contextlib.contextmanager
def served(
    start: Callable[[Path, Path], EngineProcess] = embedded_engine, timeout_s: float = 120.0
) -> Iterator[tuple[Path, EngineProcess]]:
    """The model's directory and an engine on it."""
    with tempfile.TemporaryDirectory(prefix="bench-engine-") as folder:
        path = Path(folder) / "model"
        save_served(path)
        engine = start(path, Path(folder) / "engine.log")
        engine.start()
        try:
            asyncio.run(engine.wait_ready(timeout_s))
            yield path, engine
        finally:
            engine.stop()


def seconds(engine: EngineProcess, prompts: list[list[int]], lengths: list[int], repeats: int) -> float:
    """The fastest of so many times that all requests, sent at once, took; each time other prompts, so that no prefix is known."""

    async def measure() -> float:
        async with EngineClient(engine.url, vocab_size=VOCAB_SIZE) as client:
            best = float("inf")
            for again in range(repeats + 1):  # the first warms up
                changed = [[3 + (token + again) % (VOCAB_SIZE - 3) for token in one] for one in prompts]
                started = time.perf_counter()
                calls = [
                    client.generate([one], sampling(n), [f"{again}-{i}"]) for i, (one, n) in enumerate(zip(changed, lengths, strict=True))
                ]
                await asyncio.gather(*calls)
                best = min(best, time.perf_counter() - started) if again else best
            return best

    return asyncio.run(measure())


def mixed(chance: random.Random) -> tuple[list[list[int]], list[int]]:
    """Prompts of 8 to 128 tokens and answers of 16 to 512, their logarithms even: most are short, a few are long."""
    prompts = [prompt(f"mixed {i}", round(8 * 16 ** chance.random())) for i in range(NUM_MIXED)]
    return prompts, [round(16 * 32 ** chance.random()) for _ in range(NUM_MIXED)]


def against_transformers(quick: bool) -> list[Row]:
    """16 requests of mixed length, tokens that were asked for a second; transformers has no logprobs to give."""
    prompts, lengths = mixed(random.Random(0))
    with served() as (path, engine):
        ours = sum(lengths) / seconds(engine, prompts, lengths, 2 if quick else 5)
        theirs = sum(lengths) / transformers_seconds(path, prompts, lengths, 1 if quick else 3)
    return [row("embedded_vs_transformers", ours, "output tokens/s, 16 requests of mixed length, over HTTP", theirs, ">= 3")]


def transformers_seconds(path: Path, prompts: list[list[int]], lengths: list[int], repeats: int) -> float:
    """One static batch, padded left, until the longest answer is done."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    best = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        made = model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=max(lengths), pad_token_id=0)
        best = min(best, time.perf_counter() - started)
        assert made.shape[1] == longest + max(lengths)
    return best


def against_sglang(quick: bool) -> list[Row]:
    """1, 4 and 16 requests at once, 16 tokens in, 128 out, float32 in both."""
    from rollout.engines.sglang.process import READY_TIMEOUT_S, sglang_server

    python = os.environ.get("SLIMEBUS_SGLANG_PYTHON") or str(ROOT / ".venv-sglang/bin/python")
    if not Path(python).exists():
        return [absent("embedded_vs_sglang", "no real SGLang here: bin/install-sglang")]

    def sglang(path: Path, log: Path) -> EngineProcess:
        return sglang_server(path, log, python=python, arguments=("--dtype", "float32"), on_cpu=True)

    ours, theirs = (dict(speeds(start, timeout_s, quick)) for start, timeout_s in ((embedded_engine, 120.0), (sglang, READY_TIMEOUT_S)))
    unit = "output tokens/s, requests of 16 tokens in, 128 out"
    return [row(f"embedded_vs_sglang_{count}", ours[count], unit, theirs[count], ">= 1") for count in CONCURRENT]


def speeds(start: Callable[[Path, Path], EngineProcess], timeout_s: float, quick: bool) -> Iterator[tuple[int, float]]:
    """(requests at once, output tokens a second) of an engine."""
    with served(start, timeout_s) as (_, engine):
        for count in CONCURRENT:
            prompts = [prompt(f"{count} {i}", 16) for i in range(count)]
            yield count, count * 128 / seconds(engine, prompts, [128] * count, 2 if quick else 5)


def prefill_reuse(quick: bool) -> list[Row]:
    """Ten turns of one conversation, and eight samples of one prompt: prompt tokens computed beside those that are new."""
    with served() as (_, engine):
        conversation, samples = asyncio.run(computed_tokens(engine))
    return [
        row("prefill_reuse", conversation, f"tokens computed in {TURNS} turns, beside new ones", TURNS * TURN_TOKENS, "<= 1.2"),
        row("prefill_reuse_samples", samples, "tokens computed for 8 samples of a prompt, beside one's", TURN_TOKENS, "<= 1.2"),
    ]


async def computed_tokens(engine: EngineProcess) -> tuple[int, int]:
    """Prompt tokens that were computed in the turns, and for the samples."""
    async with EngineClient(engine.url) as client:

        async def ask(ids: list[int], n: int) -> list[dict[str, Any]]:
            reply = await client.post_once("/generate", {"input_ids": [ids] * n, "sampling_params": sampling(ANSWER_TOKENS)})
            answers: list[dict[str, Any]] = json.loads(reply)
            return answers

        history, in_turns = list[int](), 0
        for turn in range(TURNS):
            history += prompt(f"turn {turn}", TURN_TOKENS)
            (answer,) = await ask(history, 1)
            in_turns += len(history) - answer["meta_info"]["cached_tokens"]
            history += answer["output_ids"]
        ids = prompt("samples", TURN_TOKENS)
        return in_turns, sum(len(ids) - answer["meta_info"]["cached_tokens"] for answer in await ask(ids, 8))

"""The real sglang-router in front of the real SGLang: what it passes on, and what it does not (docs/engine-contract.md).

Needs .venv-sglang (bin/install-sglang), or SLIMEBUS_SGLANG_PYTHON with a python that has both.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from tiny_model import save_served, sglang_python

from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import READY_TIMEOUT_S, EngineProcess, sglang_server
from slimebus.bus.errors import UsageError
from slimebus.process.launch import free_port

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(900)]

PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44, 45, 46]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(router, the engine behind it)."""
    python, path = sglang_python(), tmp_path_factory.mktemp("router")
    save_served(path / "model")
    engine = sglang_server(path / "model", path / "engine.log", python=python, arguments=("--dtype", "float32"), on_cpu=True)
    port = free_port()
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", engine.url, "--policy", "round_robin", *address]
    router = EngineProcess(command, f"http://127.0.0.1:{port}", path / "router.log")
    try:
        engine.start()
        asyncio.run(engine.wait_ready(READY_TIMEOUT_S))
        router.start()
        deadline = time.monotonic() + 120
        while asyncio.run(get(f"{router.url}/health")) != 200 or asyncio.run(post(f"{router.url}/generate", {"input_ids": [5]}))[0] != 200:
            assert time.monotonic() < deadline, (path / "router.log").read_text()[-3000:]
            time.sleep(0.5)
        yield router.url, engine.url
    finally:
        router.stop()
        engine.stop()


async def get(url: str) -> int:
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status
    except aiohttp.ClientError:
        return 0


async def post(url: str, body: dict[str, Any]) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        return response.status, await response.read()


def test_a_batch_and_samples_by_n_are_those_of_the_engine(urls: tuple[str, str]):
    async def made(url: str) -> list[Any]:
        _, batch = await post(f"{url}/generate", {"input_ids": PROMPTS, "sampling_params": GREEDY})
        _, several = await post(f"{url}/generate", {"input_ids": PROMPTS[0], "sampling_params": GREEDY | {"n": 2}})
        return [one["output_ids"] for one in [*json.loads(batch), *json.loads(several)]]

    router, engine = (asyncio.run(made(url)) for url in urls)
    assert len(router) == 4
    assert router == engine


def test_names_for_each_prompt_of_a_batch_are_refused(urls: tuple[str, str]):
    body = {"input_ids": PROMPTS, "rid": ["a", "b"], "sampling_params": GREEDY}
    assert [asyncio.run(post(f"{url}/generate", body))[0] for url in urls] == [422, 200]


def test_a_stream_comes_through_to_its_end(urls: tuple[str, str]):
    status, reply = asyncio.run(post(f"{urls[0]}/generate", {"input_ids": PROMPTS[0], "sampling_params": GREEDY, "stream": True}))
    lines = [line for line in reply.splitlines() if line]
    assert (status, lines[-1]) == (200, b"data: [DONE]")
    assert json.loads(lines[-2].removeprefix(b"data: "))["meta_info"]["finish_reason"] == {"type": "length", "length": 12}


def test_a_refusal_comes_through(urls: tuple[str, str]):
    status, reply = asyncio.run(post(f"{urls[0]}/generate", {"input_ids": [5], "sampling_params": {"temperature": -1}}))
    assert status == 400
    assert b"temperature" in reply


def test_what_pauses_aborts_and_updates_does_not_come_through_and_a_client_says_so(urls: tuple[str, str]):
    for path in ("/pause_generation", "/continue_generation", "/update_weights_from_disk", "/abort_request"):
        assert asyncio.run(post(f"{urls[0]}{path}", {}))[0] == 404

    async def attach() -> None:
        async with EngineClient(urls[0]) as client:
            await client.wait_ready(30)

    with pytest.raises(UsageError, match="a router does not pass weights on"):
        asyncio.run(attach())

"""The client through a real sglang-router in front of two embedded engines.

Needs .venv-sglang (bin/install-sglang), or SLIMEBUS_SGLANG_PYTHON with a python that has sglang-router.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from tiny_model import save_model, sglang_python

from rollout.engine_process import EngineProcess, embedded_engine
from rollout.sglang_client import Completion, EngineClient
from slimebus.errors import UsageError
from slimebus.launch import free_port

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EngineProcess, list[EngineProcess]]]:
    """(router, its two engines)."""
    python = sglang_python()
    if subprocess.run([python, "-c", "import sglang_router"], capture_output=True).returncode:
        pytest.skip("sglang-router is not installed: run bin/install-sglang")
    path = tmp_path_factory.mktemp("routed")
    save_model(path / "model", head_dim=16, max_position_embeddings=4096)
    engines = [embedded_engine(path / "model", path / f"engine{index}.log") for index in range(2)]
    port, metrics_port = free_port(), free_port()
    command = [
        *(python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"),
        *(
            "--prometheus-port",
            str(metrics_port),
            "--health-check-endpoint",
            "/ready",
            "--worker-urls",
            *(engine.url for engine in engines),
        ),
    ]
    router = EngineProcess(command, f"http://127.0.0.1:{port}", path / "router.log")
    try:
        for engine in engines:
            engine.start()
        for engine in engines:
            asyncio.run(engine.wait_ready(60))
        router.start()
        asyncio.run(wait_routed(router))
        yield router, engines
    finally:
        for process in (router, *engines):
            process.stop()


async def wait_routed(router: EngineProcess) -> None:
    async with EngineClient(router.url, retry_s=60) as client:
        await client.generate([[5]], {"max_new_tokens": 1}, ["first"])


def run(url: str, talk: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
    async def session() -> Any:
        async with EngineClient(url, retry_s=20) as client:
            return await asyncio.wait_for(talk(client), 60)

    return asyncio.run(session())


def test_batches_go_to_both_engines_and_come_back_whole(routed):
    router, engines = routed

    async def load(client: EngineClient) -> int:
        return int((await client.server_info())["internal_states"][0]["num_generated_tokens"])

    before = [run(engine.url, load) for engine in engines]

    async def talk(client: EngineClient) -> list[list[Completion]]:
        sampling = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
        return await asyncio.gather(*(client.generate([[5, 6], [7]], sampling, [f"{i}-a", f"{i}-b"]) for i in range(6)))

    answers = run(router.url, talk)
    assert len({tuple(completion.output_ids) for first, _ in answers for completion in [first]}) == 1
    assert all(completion.versions == [("default", 0, 6)] for batch in answers for completion in batch)
    after = [run(engine.url, load) for engine in engines]
    assert all(new > old for new, old in zip(after, before, strict=True))


def test_an_abort_sent_to_the_engines_ends_a_request_sent_to_the_router(routed):
    router, engines = routed

    async def talk(client: EngineClient) -> Completion:
        task = asyncio.create_task(client.generate([[5]], {"max_new_tokens": 4000, "ignore_eos": True}, ["long"]))
        await asyncio.sleep(0.3)
        for engine in engines:
            async with EngineClient(engine.url) as direct:
                await direct.abort("long")
        return (await task)[0]

    assert run(router.url, talk).finish_reason == "abort"


def test_a_refused_request_passes_the_router_with_the_engines_words(routed):
    router, _ = routed
    with pytest.raises(UsageError, match="token id 48 is outside the vocabulary of 48"):
        run(router.url, lambda client: client.generate([[48]], {"max_new_tokens": 1}, ["bad"]))


def test_a_dead_engine_is_passed_over(routed):
    router, engines = routed
    engines[1].stop()
    completions = run(router.url, lambda client: client.generate([[5]] * 4, {"max_new_tokens": 3, "ignore_eos": True}, list("abcd")))
    assert [len(completion.output_ids) for completion in completions] == [3] * 4

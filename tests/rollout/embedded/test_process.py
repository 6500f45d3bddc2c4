"""The engine as a process: how it starts, idles, refuses and ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rollout.engines.backends import embedded_engine
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import EngineProcess, EngineStartError
from rollout.samples.response import Completion

pytestmark = pytest.mark.integration


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rollout.embedded", *arguments], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def engine(qwen3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log_path = tmp_path_factory.mktemp("engine") / "engine.log"
    process = embedded_engine(qwen3[0], log_path, arguments=("--max-running-requests", "4", "--max-queued-requests", "4"))
    process.start()
    try:
        asyncio.run(process.wait_ready(60))
        yield process
    finally:
        process.stop()


def test_help_answers_without_torch():
    check = "import sys; import rollout.embedded.__main__; print('torch' in sys.modules, 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True).stdout == "False False\n"
    assert "--model-path" in run_command("--help").stdout


def test_a_missing_model_is_one_line_and_exit_2(tmp_path: Path):
    result = run_command("--model-path", str(tmp_path), "--port", "0")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert f"{tmp_path}/config.json: No such file" in result.stderr


def test_a_taken_port_is_one_line_and_exit_2(qwen3):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_command("--model-path", str(qwen3[0]), "--port", str(port))
    assert result.returncode == 2
    assert result.stderr == f"engine: cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port\n"


def test_an_engine_that_cannot_start_shows_its_log(tmp_path: Path):
    process = embedded_engine(tmp_path, tmp_path / "engine.log")
    process.start()
    try:
        with pytest.raises(EngineStartError, match=r"(?s)exit status 2.*config.json: No such file"):
            asyncio.run(process.wait_ready(60))
    finally:
        process.stop()


def test_sigterm_ends_it_within_two_seconds_in_mid_generation(qwen3, tmp_path: Path):
    process = embedded_engine(qwen3[0], tmp_path / "engine.log")
    child = process.start()

    async def talk() -> float:
        await process.wait_ready(60)
        async with EngineClient(process.url, retry_s=0) as client:
            rids = [f"{i:04d}" for i in range(1000)]  # many seconds of work
            task = asyncio.create_task(client.generate([[5]] * 1000, {"max_new_tokens": 120, "ignore_eos": True}, rids))
            await asyncio.sleep(0.02)
            started_s = time.monotonic()
            child.send_signal(signal.SIGTERM)
            await asyncio.to_thread(child.wait, 60)
            elapsed_s = time.monotonic() - started_s
            (ended,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(ended, Exception) or any(len(c.output_ids) < 120 for c in ended), "it did not wait for all of it"
            return elapsed_s

    share = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))  # how many want each CPU: everything takes so much longer
    assert asyncio.run(talk()) < 2 * share
    assert child.returncode == 0


def test_idle_it_uses_less_than_a_hundredth_of_a_core(engine: EngineProcess):
    (process,) = psutil.Process(engine.pid).children()
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.02


def post(engine: EngineProcess, path: str, body: Any) -> tuple[int, Any]:
    async def send() -> tuple[int, Any]:
        async with aiohttp.ClientSession() as session, session.post(engine.url + path, json=body) as response:
            return response.status, await response.json(content_type=None)

    return asyncio.run(send())


def test_more_requests_than_the_queue_holds_get_503(engine: EngineProcess):
    status, answer = post(engine, "/generate", {"input_ids": [[5]] * 9, "sampling_params": {"max_new_tokens": 2}})
    assert status == 503
    assert "exceed the limit of 8" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input_ids": [5, 48]}, "token id 48 is outside the vocabulary of 48"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [5, [6]]}, "mixes"),
        ({}, "missing required field `input_ids`"),
        ({"input_ids": [5], "stream": True}, "unknown field `stream`, but for off"),
        ({"input_ids": [5], "sampling_params": {"stop": ["x"]}}, "need a tokenizer"),
        ({"input_ids": [[5], [6]], "rid": ["a", "a"]}, "duplicate"),
        ({"input_ids": [5] * 128}, "longer than the model's context length"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 128}}, "maximum context length"),
        ({"input_ids": [5], "sampling_params": {"top_k": 0}}, "top_k must be -1 (disable) or at least 1, got 0"),
        ({"input_ids": [5], "sampling_params": {"n": 2}}, "unknown field `n`"),
        ({"input_ids": [[5], [6]], "sampling_params": [{}]}, "a list of 1 values for 2 prompts"),
        ({"input_ids": [5], "top_logprobs_num": 2}, "unknown field `top_logprobs_num`; this engine takes input_ids, rid"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_400_and_the_server_lives(engine: EngineProcess, body: Any, words: str):
    status, answer = post(engine, "/generate", body)
    assert status == 400
    assert words in str(answer["error"]["message"])
    assert post(engine, "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}})[0] == 200


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"input_ids": "x"}'])
def test_bytes_that_are_not_a_request_are_a_400(engine: EngineProcess, body: bytes):
    async def send() -> int:
        async with aiohttp.ClientSession() as session, session.post(engine.url + "/generate", data=body) as response:
            return response.status

    assert asyncio.run(send()) == 400


def test_a_client_that_goes_away_frees_its_rows(engine: EngineProcess):
    async def talk() -> dict[str, Any]:
        async with EngineClient(engine.url) as client:
            await client.pause("in_place")
            task = asyncio.create_task(client.generate([[5]] * 4, {"max_new_tokens": 100, "ignore_eos": True}, list("abcd")))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        async with EngineClient(engine.url) as client:
            await asyncio.sleep(0.2)
            load = (await client.server_info())["internal_states"][0]
            await client.resume()
            return dict(load)

    load = asyncio.run(talk())
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)


def test_a_request_that_arrives_while_paused_can_be_aborted(engine: EngineProcess):
    async def talk() -> Completion:
        async with EngineClient(engine.url) as client:
            await client.pause("in_place")
            task = asyncio.create_task(client.generate([[5]], {"max_new_tokens": 4}, ["waiting"]))
            await asyncio.sleep(0.1)
            await client.abort("waiting")
            completion = (await asyncio.wait_for(task, 5))[0]
            await client.resume()
            return completion

    completion = asyncio.run(talk())
    assert (completion.finish_reason, len(completion.output_ids)) == ("abort", 0)


def test_a_wrong_pause_mode_is_a_400(engine: EngineProcess):
    assert post(engine, "/pause_generation", {"mode": "sideways"})[0] == 400


CONTROL = [
    ("GET", "/health", {}),
    ("GET", "/health_generate", {}),
    ("GET", "/server_info", {}),
    ("POST", "/abort_request", {"rid": "nobody"}),
    ("POST", "/continue_generation", {}),
    ("POST", "/pause_generation", {"mode": "in_place"}),
    ("POST", "/pause_generation", {"mode": "retract"}),
    ("POST", "/update_weights_from_disk", {"model_path": "MODEL", "weight_version": "y"}),
    ("POST", "/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}}),
]


@pytest.mark.parametrize(("method", "path", "body"), CONTROL, ids=lambda value: value if isinstance(value, str) else "")
def test_a_client_that_drops_its_connection_does_not_end_the_engine(engine: EngineProcess, qwen3, method: str, path: str, body: Any):
    content = json.dumps(body).replace("MODEL", str(qwen3[0])).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    host, port = engine.url.removeprefix("http://").split(":")

    async def drop() -> None:
        load = {"temperature": 1.0, "max_new_tokens": 100, "ignore_eos": True}
        async with EngineClient(engine.url, retry_s=0) as client:
            busy = [asyncio.ensure_future(client.generate([[1, 2, 3]], load, [f"{path}-{i}"])) for i in range(4)]
            for i in range(40):
                with socket.create_connection((host, int(port))) as dropped:
                    dropped.sendall((head + content)[: None if i % 4 else len(head) + len(content) // 2])
                    await asyncio.sleep(0.002 * (i % 5))
                    if i % 2:  # with a reset instead of an end
                        dropped.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            await asyncio.sleep(0.2)
            await client.resume()
            await asyncio.gather(*busy, return_exceptions=True)
            (completion,) = await client.generate([[1, 2, 3]], {"max_new_tokens": 3, "ignore_eos": True}, ["after"])
            assert len(completion.output_ids) == 3

    asyncio.run(asyncio.wait_for(drop(), 60))

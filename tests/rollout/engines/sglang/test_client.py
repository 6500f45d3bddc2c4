"""The client against a scripted engine: what it sends, what it retries, what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from rollout.engines.sglang.client import EngineClient
from rollout.samples.response import EngineError
from slimebus.bus.errors import Unreachable, UsageError, WeightsError

Talk = Callable[[EngineClient], Awaitable[Any]]


CUT_OFF = object()
"""A body that ends in the middle, as when the engine is killed."""


class ScriptedEngine:
    """Answers each path with the next scripted (status, body), repeating the last; remembers what was asked."""

    def __init__(self, **script: list[tuple[int, Any]]) -> None:
        self.script = {"/" + path: list(answers) for path, answers in script.items()}
        self.asked: list[tuple[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json() if request.can_read_body else None))
        answers = self.script.get(request.path, [(200, {})])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        if body is CUT_OFF:
            cut = web.StreamResponse(headers={"Content-Length": "100"})
            await cut.prepare(request)
            await cut.write(b"[")
            assert request.transport is not None
            request.transport.close()
            return cut
        return web.json_response(body, status=status)


def talk_to(engine: ScriptedEngine, talk: Talk, **options: Any) -> Any:
    async def session() -> Any:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", engine.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            async with EngineClient(f"http://127.0.0.1:{port}/", retry_s=options.pop("retry_s", 2), **options) as client:
                return await talk(client)
        finally:
            await runner.cleanup()

    return asyncio.run(session())


def answer(rid: str = "a.", **meta: Any) -> dict[str, Any]:
    info = {"id": rid, "finish_reason": {"type": "stop", "matched": 1}, "prompt_tokens": 2, "weight_version": "v3"}
    info["output_token_logprobs"] = [[-0.5, 7, None], [-0.25, 1, None]]
    return {"text": "x", "output_ids": [7, 1], "meta_info": info | meta}


def test_an_answer_becomes_typed_arrays():
    spans = [{"version": "v2", "start": 0, "end": 1}, {"version": "v3", "start": 1, "end": 2}]
    engine = ScriptedEngine(generate=[(200, [answer(weight_versions=spans, e2e_latency=0.1)])])
    completion = talk_to(engine, lambda client: client.generate([[3, 4]], {"temperature": 1.0}, ["a"]))[0]
    np.testing.assert_array_equal(completion.output_ids, np.array([7, 1], dtype=np.int32))
    np.testing.assert_array_equal(completion.logprobs, np.array([-0.5, -0.25], dtype=np.float32))
    assert completion.versions == [("v2", 0, 1), ("v3", 1, 2)]
    assert completion.finish_reason == "stop"
    path, body = engine.asked[0]
    assert path == "/generate"
    assert body == {"input_ids": [[3, 4]], "sampling_params": {"temperature": 1.0}, "rid": ["a."], "return_logprob": True}


def test_an_engine_without_spans_has_made_all_tokens_by_its_version():
    engine = ScriptedEngine(generate=[(200, [answer()])])
    assert talk_to(engine, lambda client: client.generate([[3]], {}, ["a"]))[0].versions == [("v3", 0, 2)]


def test_busy_answers_are_retried():
    engine = ScriptedEngine(generate=[(503, {"error": {"message": "full"}}), (502, {}), (200, [answer()])])
    assert len(talk_to(engine, lambda client: client.generate([[3]], {}, ["a"]))) == 1
    assert len(engine.asked) == 3


def test_an_answer_that_is_cut_off_in_the_middle_counts_as_lost_and_is_asked_for_again():
    engine = ScriptedEngine(generate=[(200, CUT_OFF), (200, [answer()])])
    assert len(talk_to(engine, lambda client: client.generate([[3]], {}, ["a"]))) == 1
    assert [body["rid"] for _, body in engine.asked] == [["a."], ["a.1."]]


def test_an_engine_that_stays_busy_is_unreachable_and_named():
    engine = ScriptedEngine(generate=[(503, {"error": {"message": "no workers"}})])
    with pytest.raises(Unreachable, match=r"engine http://127.0.0.1:\d+: /generate failed for 0 s, last: 503 no workers"):
        talk_to(engine, lambda client: client.generate([[3]], {}, ["a"]), retry_s=0.2)


def test_nobody_listening_is_unreachable_after_the_deadline():
    async def talk() -> None:
        async with EngineClient("http://127.0.0.1:9", retry_s=0.2) as client:
            await client.model_info()

    with pytest.raises(Unreachable, match=r"engine http://127.0.0.1:9: /model_info failed"):
        asyncio.run(talk())


def test_a_refused_request_is_a_usage_error_with_the_engines_words():
    engine = ScriptedEngine(generate=[(400, {"error": "Object contains unknown field `x`"})])
    with pytest.raises(UsageError, match="answered 400: Object contains unknown field"):
        talk_to(engine, lambda client: client.generate([[3]], {"x": 1}, ["a"]))
    assert len(engine.asked) == 1


def test_a_failing_engine_is_an_engine_error_and_not_retried():
    engine = ScriptedEngine(generate=[(500, {"error": {"message": "boom"}})])
    with pytest.raises(EngineError, match="boom"):
        talk_to(engine, lambda client: client.generate([[3]], {}, ["a"]))
    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([answer(), answer()], "2 answers to 1 prompts"),
        ([answer(output_token_logprobs=[])], "2 tokens and 0 logprobs"),
        ([answer(output_token_logprobs=[[None, 7, None], [-0.25, 1, None]])], "no numbers"),
        ([answer(finish_reason=None)], "before it finished"),
        ({"surprise": 1}, "is not SGLang's"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_an_engine_error(body: Any, words: str):
    with pytest.raises(EngineError, match=words):
        talk_to(ScriptedEngine(generate=[(200, body)]), lambda client: client.generate([[3]], {}, ["a"]))


@pytest.mark.parametrize("token", [-1, 38])
def test_a_token_outside_the_vocabulary_is_refused_before_it_is_sent(token: int):
    engine = ScriptedEngine()
    with pytest.raises(UsageError, match=f"request a: token id {token} is outside the vocabulary of 38"):
        talk_to(engine, lambda client: client.generate([[3, token]], {}, ["a"]), vocab_size=38)
    assert engine.asked == []


def test_weights_are_updated_without_flushing_and_a_refusal_is_a_weights_error():
    engine = ScriptedEngine(update_weights_from_disk=[(200, {"success": True}), (400, {"success": False, "message": "no such file"})])
    talk_to(engine, lambda client: client.update_weights_from_disk("/w", "v4"))
    assert engine.asked[0][1] == {"model_path": "/w", "weight_version": "v4", "flush_cache": False}
    with pytest.raises(WeightsError, match=r"weights v5 of /w were refused: .*no such file"):
        talk_to(engine, lambda client: client.update_weights_from_disk("/w", "v5"))


def test_abort_names_the_request_so_that_no_longer_id_begins_with_it():
    engine = ScriptedEngine()
    talk_to(engine, lambda client: client.abort("w-1"))
    assert engine.asked == [("/abort_request", {"rid": "w-1."})]


def test_wait_ready_ends_as_soon_as_the_process_is_dead():
    async def talk() -> None:
        async with EngineClient("http://127.0.0.1:9") as client:
            await client.wait_ready(60, is_dead=lambda: True)

    with pytest.raises(Unreachable, match="ended before it was ready"):
        asyncio.run(talk())


def test_a_wait_for_an_engine_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    async def talk() -> None:
        async with EngineClient("http://127.0.0.1:9") as client:
            await client.wait_ready(0.4)

    monkeypatch.setattr("rollout.engines.sglang.client.WAIT_NOTE_S", 0.1)
    with caplog.at_level("INFO", "rollout"), pytest.raises(Unreachable, match="was not ready within 0 s"):
        asyncio.run(talk())
    assert "waiting for the engine at http://127.0.0.1:9 to be ready (0 of 0 s)" in caplog.text


def test_a_router_is_not_waited_for():
    engine = ScriptedEngine(ready=[(503, {}), (404, {})], ping=[(404, {})])
    with pytest.raises(UsageError, match=r"knows neither /ready nor /ping and is no engine; a router does not pass weights on"):
        talk_to(engine, lambda client: client.wait_ready(60))


def test_a_call_that_is_tried_again_after_the_client_was_closed_opens_no_new_connection():
    async def close_meanwhile(client: EngineClient) -> None:
        asking = asyncio.ensure_future(client.abort("a"))
        await asyncio.sleep(0.2)
        await client.close()
        with pytest.raises(Unreachable, match="closed"):
            await asking
        assert not await client.is_ready()

    talk_to(ScriptedEngine(abort_request=[(503, {})], ready=[(200, {})]), close_meanwhile)

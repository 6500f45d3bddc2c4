"""One contract, two engines: the embedded one and, where it is installed, the real SGLang (docs/engine-contract.md).

The sglang side needs .venv-sglang (bin/install-sglang), or SLIMEBUS_SGLANG_PYTHON with a python that has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from tiny_model import SERVED, SPECIAL_TOKENS, save_served, sglang_python

from rollout.endpoint.chat import parse_by_sglang
from rollout.engines.backends import embedded_engine
from rollout.engines.sglang.client import EngineClient
from rollout.engines.sglang.process import READY_TIMEOUT_S, EngineProcess, sglang_server
from rollout.samples.response import Completion
from slimebus.bus.errors import UsageError, WeightsError

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

VOCAB_SIZE, EOS = SERVED["vocab_size"], SERVED["eos_token_id"]
LETTER_A = 67  # in the byte-level alphabet, sorted, after the special tokens
PROMPTS = [[11, 12, 13], [40, 41, 42, 43, 44, 45, 46], [300], [7, 8]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
LONG = {"temperature": 1.0, "max_new_tokens": 1500, "ignore_eos": True}
# Both compute in float32 here. In bfloat16 SGLang differs by 4e-3 (6e-3 at temperature 0.5) on this model.
TOLERANCE = 1e-4


class Engine:
    """A running engine, a way to talk to it, and what it should say."""

    def __init__(self, kind: str, process: EngineProcess, model_path: Path, other_path: Path, model: Any) -> None:
        self.kind, self.process, self.model_path, self.other_path, self.model = kind, process, model_path, other_path, model

    def run(self, talk: Callable[[EngineClient], Coroutine[Any, Any, Any]]) -> Any:
        async def session() -> Any:
            async with EngineClient(self.process.url, vocab_size=VOCAB_SIZE, retry_s=5) as client:
                try:
                    return await asyncio.wait_for(talk(client), 120)
                finally:
                    await client.resume()

        return asyncio.run(session())

    def post(self, path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
        async def send() -> tuple[int, Any]:
            async with aiohttp.request(method, self.process.url + path, json=body) as response:
                is_json = response.content_type == "application/json"
                return response.status, await (response.json() if is_json else response.text())

        return asyncio.run(send())

    def get_status(self, path: str) -> int:
        return self.post(path, method="GET")[0]


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    python = sglang_python() if request.param == "sglang" else ""
    path = tmp_path_factory.mktemp(request.param)
    model = save_served(path / "model", seed=0)
    save_served(path / "other", seed=1)
    if not python:
        process, timeout_s = embedded_engine(path / "model", path / "engine.log"), 60.0
    else:
        arguments = ("--dtype", "float32")
        process = sglang_server(path / "model", path / "engine.log", python=python, arguments=arguments, on_cpu=True)
        timeout_s = READY_TIMEOUT_S
    process.start()
    try:
        asyncio.run(process.wait_ready(timeout_s))
        yield Engine(request.param, process, path / "model", path / "other", model)
    finally:
        process.stop()


def rids(count: int, name: str) -> list[str]:
    return [f"{name}-{index}" for index in range(count)]


def test_a_batch_gives_one_completion_a_prompt_in_order(engine: Engine):
    completions = engine.run(lambda client: client.generate(PROMPTS, GREEDY, rids(4, "batch")))
    for completion in completions:
        assert completion.output_ids.dtype == np.int32
        assert completion.logprobs.dtype == np.float32
        assert completion.output_ids.shape == completion.logprobs.shape == (12,)
        assert completion.finish_reason == "length"
        assert [(start, end) for _, start, end in completion.versions] == [(0, 12)]


def expected_logprobs(engine: Engine, prompt: list[int], completion: Completion, temperature: float) -> np.ndarray:
    import torch

    ids = torch.tensor([[*prompt, *completion.output_ids.tolist()]])
    with torch.no_grad():
        logits = engine.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(engine: Engine, temperature: float):
    sampling = {**GREEDY, "temperature": temperature, "top_k": 40 if temperature else -1}
    completions = engine.run(lambda client: client.generate(PROMPTS, sampling, rids(4, f"logprob{temperature}")))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = expected_logprobs(engine, prompt, completion, temperature or 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_a_stop_token_is_kept_in_the_output(engine: Engine):
    greedy = engine.run(lambda client: client.generate([PROMPTS[0]], GREEDY, ["free"]))[0].output_ids.tolist()
    stop = greedy[4]
    sampling = {"temperature": 0.0, "max_new_tokens": 12, "stop_token_ids": [stop]}
    status, answer = engine.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": sampling, "return_logprob": True})
    assert status == 200
    assert answer["output_ids"] == greedy[: greedy.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert len(answer["meta_info"]["output_token_logprobs"]) == len(answer["output_ids"])
    assert answer["meta_info"]["output_token_logprobs"][0][1:] == [greedy[0], None]


def test_a_stop_string_ends_the_sequence(engine: Engine):
    forced = {"temperature": 0.0, "max_new_tokens": 12, "logit_bias": {str(LETTER_A): 100.0}}
    status, answer = engine.post("/generate", {"input_ids": PROMPTS[0], "sampling_params": {**forced, "stop": ["aaa"]}})
    assert status == 200
    assert answer["output_ids"] == [LETTER_A] * 3
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "aaa"}


def test_a_stop_string_may_be_a_special_tokens_text(engine: Engine):
    pad = SPECIAL_TOKENS.index("<|endoftext|>")
    forced = {"temperature": 0.0, "max_new_tokens": 5, "ignore_eos": True, "logit_bias": {str(pad): 100.0}}
    status, answer = engine.post("/generate", {"input_ids": [11, 12], "sampling_params": {**forced, "stop": ["<|endoftext|>"]}})
    assert status == 200
    assert (answer["output_ids"], answer["meta_info"]["finish_reason"]["type"]) == ([pad], "stop")


def test_no_end_token_comes_before_min_new_tokens_also_where_it_ends_nothing(engine: Engine):
    forced = {"temperature": 0.0, "max_new_tokens": 5, "min_new_tokens": 3, "ignore_eos": True, "logit_bias": {str(EOS): 100.0}}
    _, answer = engine.post("/generate", {"input_ids": [11, 12], "sampling_params": forced})
    assert EOS not in answer["output_ids"][:3]
    assert answer["output_ids"][3:] == [EOS, EOS]


def test_a_request_that_says_no_length_is_cut_at_the_contexts_end(engine: Engine):
    length = engine.run(lambda client: client.server_info())["context_length"] or SERVED["max_position_embeddings"]
    status, answer = engine.post("/generate", {"input_ids": [11] * (length - 10), "sampling_params": {"ignore_eos": True}})
    assert status == 200
    assert 0 < len(answer["output_ids"]) <= 10


@pytest.mark.parametrize(
    "field", [{"lora_path": "x"}, {"session_params": {"id": "x"}}, {"return_hidden_states": True}, {"token_ids_logprob": [1]}]
)
def test_what_the_embedded_engine_does_not_serve_is_refused(engine: Engine, field: dict[str, Any]):
    if engine.kind == "embedded":
        status, answer = engine.post("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}} | field)
        assert status == 400
        assert f"unknown field `{next(iter(field))}`" in answer["error"]["message"]
        assert answer["error"]["message"].endswith("for other fields of /generate use SGLang")


def test_penalties_count_generated_tokens_and_are_part_of_the_logprobs(engine: Engine):
    import torch

    sampling = {**GREEDY, "frequency_penalty": 0.7, "presence_penalty": 0.4}
    completion = engine.run(lambda client: client.generate([PROMPTS[1]], sampling, ["penalised"]))[0]
    ids = torch.tensor([[*PROMPTS[1], *completion.output_ids.tolist()]])
    with torch.no_grad():
        logits = engine.model(ids, use_cache=False).logits[0, len(PROMPTS[1]) - 1 : -1]
    counts = torch.zeros(VOCAB_SIZE)
    for row, token, logprob in zip(logits, completion.output_ids.tolist(), completion.logprobs.tolist(), strict=True):
        penalised = row - 0.7 * counts - 0.4 * (counts > 0)
        assert abs(float(penalised.log_softmax(-1)[token]) - logprob) < TOLERANCE
        assert token == int(penalised.argmax())
        counts[token] += 1


def test_given_tokens_are_scored_as_transformers_does(engine: Engine):
    import torch

    scored = engine.run(lambda client: client.score(PROMPTS[1], "scored"))
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        logprobs = engine.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    assert scored.dtype == np.float32
    assert scored[0] == 0
    np.testing.assert_allclose(scored[1:], logprobs.numpy(), atol=TOLERANCE, rtol=0)


def test_input_logprobs_score_the_prompt_and_the_first_is_null(engine: Engine):
    sampling = {"temperature": 0.0, "max_new_tokens": 1}
    body = {"input_ids": PROMPTS[1], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    _, answer = engine.post("/generate", body)
    scored = answer["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in scored] == PROMPTS[1]
    assert scored[0][0] is None
    assert all(entry[0] < 0 for entry in scored[1:])


def test_a_turn_computes_only_what_the_turn_before_did_not_until_the_cache_is_flushed(engine: Engine):
    def ask(prompt: list[int], key: str = "turns") -> tuple[list[int], list[float], int]:
        body = {"input_ids": prompt, "sampling_params": GREEDY, "return_logprob": True, "extra_key": key}
        status, answer = engine.post("/generate", body)
        assert status == 200
        logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        return answer["output_ids"], logprobs, answer["meta_info"]["cached_tokens"]

    first = [*PROMPTS[1], *ask(PROMPTS[1])[0]]
    second = [*first, 7, 8, 9]
    ids, logprobs, num_cached = ask(second)
    assert num_cached == len(first) - 1  # the last token's keys and values were not needed yet
    assert ask(second, "another")[2] == 0
    assert ask(second)[2] == len(second) - 1
    assert engine.post("/flush_cache")[0] == 200
    again, computed, num_cached = ask(second)
    assert (again, num_cached) == (ids, 0)
    np.testing.assert_allclose(logprobs, computed, atol=1e-5, rtol=0)


def test_calls_of_tools_are_parsed_by_sglangs_own_parsers_where_it_runs(engine: Engine):
    async def talk(client: EngineClient) -> Any:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
        text = 'so<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        return await parse_by_sglang(client, "qwen25", text, tools)

    if engine.kind == "embedded":
        with pytest.raises(UsageError, match="404"):
            engine.run(talk)
        return
    content, (call,) = engine.run(talk)
    assert (content, call["function"]) == ("so", {"name": "add", "arguments": {"a": 1}})


def test_abort_returns_what_was_generated_and_leaves_the_others(engine: Engine):
    async def talk(client: EngineClient) -> tuple[Completion, Completion]:
        # "w-1" is a prefix of "w-10": both engines abort by prefix, the client must not let it show.
        first, second = (asyncio.create_task(client.generate([PROMPTS[0]], LONG, [rid])) for rid in ("w-1", "w-10"))
        await asyncio.sleep(0.5)
        await client.abort("w-1")
        aborted = (await asyncio.wait_for(first, 20))[0]
        assert not second.done()
        await client.post_once("/abort_request", {"abort_all": True})
        return aborted, (await second)[0]

    for completion in engine.run(talk):
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.output_ids) < 1500
        assert len(completion.logprobs) == len(completion.output_ids)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_paused_engine_is_not_ready_and_goes_on_where_it_was(engine: Engine, mode: str):
    sampling = {**GREEDY, "max_new_tokens": 200}
    alone = engine.run(lambda client: client.generate([PROMPTS[0]], sampling, ["alone"]))[0]

    async def talk(client: EngineClient) -> Completion:
        task = asyncio.create_task(client.generate([PROMPTS[0]], sampling, [f"paused-{mode}"]))
        await asyncio.sleep(0.05)
        await client.pause(mode)
        assert not await client.is_ready()
        await client.wait_ready(1)  # for who attaches, a paused engine is up
        await asyncio.sleep(0.3)
        await client.resume()
        assert await client.is_ready()
        return (await task)[0]

    completion = engine.run(talk)
    assert completion.finish_reason == "length"
    assert completion.output_ids[:40].tolist() == alone.output_ids[:40].tolist()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_in_mid_generation_leaves_a_span_for_each_version(engine: Engine, mode: str):
    async def talk(client: EngineClient) -> tuple[Completion, str, str]:
        before = await client.weight_version()
        task = asyncio.create_task(client.generate([PROMPTS[0]], {**LONG, "max_new_tokens": 800}, [f"inflight-{mode}"]))
        await asyncio.sleep(0.3)
        await client.pause(mode)
        await client.update_weights_from_disk(str(engine.other_path), f"v-{mode}")
        await client.resume()
        completion = (await task)[0]
        return completion, before, await client.weight_version()

    completion, before, after = engine.run(talk)
    assert after == f"v-{mode}"
    assert [version for version, _, _ in completion.versions] == [before, after]
    assert completion.versions[0][1] == 0
    assert completion.versions[0][2] == completion.versions[1][1]
    assert completion.versions[1][2] == len(completion.output_ids) == 800


def test_updated_weights_are_the_ones_that_answer(engine: Engine):
    async def talk(client: EngineClient) -> list[Completion]:
        found = []
        for path, version in ((engine.other_path, "other"), (engine.model_path, "back")):
            await client.pause("retract")
            await client.update_weights_from_disk(str(path), version)
            await client.resume()
            found += await client.generate([PROMPTS[1]], GREEDY, [version], cache_key=version)  # as a worker does: see Traps
        return found

    other, back = engine.run(talk)
    assert other.versions == [("other", 0, 12)]
    assert back.versions == [("back", 0, 12)]
    assert other.output_ids.tolist() != back.output_ids.tolist()
    expected = expected_logprobs(engine, PROMPTS[1], back, 1.0)
    np.testing.assert_allclose(back.logprobs, expected, atol=TOLERANCE, rtol=0)


def test_weights_that_are_not_there_are_refused_and_nothing_changes(engine: Engine, tmp_path: Path):
    async def talk(client: EngineClient) -> tuple[str, str, list[Completion]]:
        before = await client.weight_version()
        await client.pause("retract")
        with pytest.raises(WeightsError, match="refused"):
            await client.update_weights_from_disk(str(tmp_path / "nowhere"), "bad")
        await client.resume()
        return before, await client.weight_version(), await client.generate([PROMPTS[0]], GREEDY, ["after"])

    before, after, completions = engine.run(talk)
    assert before == after
    assert completions[0].versions == [(before, 0, 12)]


def test_a_token_outside_the_vocabulary_never_reaches_the_engine(engine: Engine):
    with pytest.raises(UsageError, match="token id 512 is outside the vocabulary of 512"):
        engine.run(lambda client: client.generate([[1, VOCAB_SIZE]], GREEDY, ["outside"]))
    assert engine.get_status("/ready") == 200


def test_an_unknown_sampling_field_is_a_400(engine: Engine):
    status, answer = engine.post("/generate", {"input_ids": [5], "sampling_params": {"temprature": 1.0}})
    assert status == 400
    assert "temprature" in str(answer["error"])


def test_a_value_out_of_range_and_too_long_a_request_are_400_with_a_message(engine: Engine):
    for sampling in ({"temperature": -1}, {"max_new_tokens": 4096}):
        status, answer = engine.post("/generate", {"input_ids": [5], "sampling_params": sampling})
        assert status == 400
        assert isinstance(answer["error"]["message"], str)


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping", "/model_info", "/server_info"])
def test_state_endpoints_answer_200(engine: Engine, path: str):
    assert engine.get_status(path) == 200


def test_model_info_and_server_info_name_the_model_and_the_version(engine: Engine):
    async def talk(client: EngineClient) -> tuple[dict[str, Any], dict[str, Any]]:
        return await client.model_info(), await client.server_info()

    model_info, server_info = engine.run(talk)
    assert model_info["is_generation"] is True
    assert isinstance(model_info["weight_version"], str)
    assert server_info["model_path"] == str(engine.model_path)
    assert server_info["internal_states"]

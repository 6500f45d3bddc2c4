"""Samples cut off in the middle and continued by token id."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.dispatch import Dispatch
from rollout.engines.engine import Engine
from rollout.engines.pool import EnginePool
from rollout.samples import partials
from rollout.samples.response import Completion, EngineError, Response, Task
from slimebus.bus.errors import ProtocolError
from slimebus.bus.messages import NO_VERSION, LeasedGroup
from slimebus.config.schema import EngineConfig, RunConfig

PROMPT = np.array([5, 6], np.int32)
LEASE = LeasedGroup(group="0/1", lease=3, num_samples=2, deadline_s=60)


def task(index: int = 0, **sampling: Any) -> Task:
    return Task(prompt="ab", prompt_ids=PROMPT, sampling={"max_new_tokens": 6, **sampling}, group="0/1", index=index)


def response(ids: list[int], versions: list[tuple[int, int]], reason: str = "abort", index: int = 0) -> Response:
    logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32)
    return Response(
        task=task(index), token_ids=np.array(ids, np.int32), logprobs=logprobs, versions=versions, text="", finish_reason=reason
    )


def frames_of(responses: list[Response]) -> list[Any]:
    return partials.give_back_message(LEASE, "L", responses)[1]


def test_what_is_handed_over_comes_back_as_it_was() -> None:
    made = [response([1, 2, 3], [(4, 2), (5, 1)]), response([7], [(5, 1)], "stop", index=1)]
    again = partials.decode_partial([task(0), task(1)], frames_of(made))
    for before, after in zip(made, again, strict=True):
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert after.logprobs.tolist() == before.logprobs.tolist()
        assert (after.versions, after.finish_reason) == (before.versions, before.finish_reason)


def test_a_sample_that_had_not_begun_survives_beside_one_that_had() -> None:
    again = partials.decode_partial([task(0), task(1)], frames_of([response([1], [(4, 1)]), partials.empty_response(task(1))]))
    assert [len(r.token_ids) for r in again] == [1, 0]
    assert again[1].versions == []


def test_a_group_without_a_token_is_given_back_plainly() -> None:
    message, frames = partials.give_back_message(LEASE, "L", [partials.empty_response(task())])
    assert (message.outcome, frames) == ("requeue", [])


def test_a_partial_of_another_tokenizer_is_refused() -> None:
    other = Task(prompt="ab", prompt_ids=np.array([9, 9], np.int32), sampling={}, group="0/1")
    with pytest.raises(ProtocolError, match="does not begin with the prompt's tokens"):
        partials.decode_partial([other], frames_of([response([1], [(4, 1)])]))


def test_a_continued_response_joins_runs_of_one_version() -> None:
    joined = partials.continue_response(response([1, 2], [(4, 2)]), completion([3, 0], "stop", 5), [(4, 1), (5, 1)])
    assert joined.token_ids.tolist() == [1, 2, 3, 0]
    assert joined.versions == [(4, 3), (5, 1)]
    assert joined.finish_reason == "stop"


class Scripted:
    """An engine client that gives these completions, a list for each call."""

    def __init__(self, *rounds: list[Completion]) -> None:
        self.rounds, self.asked, self.aborted = list(rounds), [], []
        self.release = asyncio.Event()
        self.release.set()

    async def generate(self, prompts: list[list[int]], samplings: list[dict[str, Any]], rids: list[str], **_: str) -> list[Completion]:
        self.asked.append((prompts, samplings))
        await self.release.wait()
        return self.rounds.pop(0)

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)
        self.release.set()


def engines(client: Scripted, tmp_path: Path) -> Dispatch:
    (tmp_path / "config.json").write_text('{"vocab_size": 100}')
    made = EnginePool(RunConfig(), tmp_path, tmp_path, name="w")
    engine = Engine("http://nowhere", None, 100, EngineConfig())
    engine.client = client  # type: ignore[assignment]
    made.add(engine)
    engine.state.phase, made.lineage = "serving", "L"
    return Dispatch(made)


def completion(ids: list[int], reason: str, version: int) -> Completion:
    return Completion(
        output_ids=np.array(ids, np.int32),
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason=reason,
        versions=[(f"L:{version}", 0, len(ids))] if ids else [],
    )


def test_a_sample_ended_by_a_weight_update_is_continued_with_the_tokens_it_has(tmp_path: Path) -> None:
    client = Scripted([completion([1, 2], "abort", 3), completion([9], "stop", 3)], [completion([3], "stop", 4)])
    first, second = asyncio.run(engines(client, tmp_path).sample([task(0, min_new_tokens=3), task(1)]))
    assert client.asked[1] == ([[5, 6, 1, 2]], [{"max_new_tokens": 4, "min_new_tokens": 1}])
    assert (first.token_ids.tolist(), first.versions, first.finish_reason) == ([1, 2, 3], [(3, 2), (4, 1)], "stop")
    assert second.token_ids.tolist() == [9]


def test_an_engine_that_ends_samples_without_a_token_again_and_again_is_an_error(tmp_path: Path) -> None:
    client = Scripted(*([completion([], "abort", 3)] for _ in range(20)))
    with pytest.raises(EngineError, match="10 times without making a token"):
        asyncio.run(engines(client, tmp_path).sample([task()]))


def test_a_finished_beginning_is_not_sampled_again(tmp_path: Path) -> None:
    client = Scripted()
    begun = [response([1, 0], [(NO_VERSION + 4, 2)], "stop")]
    assert asyncio.run(engines(client, tmp_path).sample([task()], begun)) == begun
    assert client.asked == []

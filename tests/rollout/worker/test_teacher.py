"""What a teacher puts for samples that its engine can score, and for those that it cannot."""

import asyncio

import numpy as np
import pytest
from click.testing import CliRunner

from rollout.engines.sglang.client import EngineClient
from rollout.worker.teacher import scores_of
from slimebus.bus.errors import UsageError
from slimebus.bus.samples import Sample
from slimebus.cli.root import root
from slimebus.client.consumer import ConsumedGroup
from slimebus.config import resolve
from slimebus.config.file_checks import teacher_problems


class MadeUpEngine(EngineClient):
    """Scores each token with minus its id; refuses sequences of more than 4."""

    async def score(self, tokens: list[int], rid: str) -> np.ndarray:
        if len(tokens) > 4:
            raise UsageError("the input is longer than the context")
        return -np.array(tokens, np.float32)


def sample(tokens: list[int], *, temperature: float = 1.0, trained: int = 1) -> Sample:
    count = len(tokens)
    mask = np.array([0] * (count - trained) + [1] * trained, np.uint8)
    arrays = {"tokens": np.array(tokens, np.int32), "loss_mask": mask, "rollout_logprobs": np.zeros(count, np.float32)}
    return Sample(**arrays, versions=[(0, count)], reward=1.0, temperature=temperature)


def test_what_cannot_be_scored_gets_numbers_that_the_trainer_refuses_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    samples = [sample([1, 2, 3]), sample([1, 2], temperature=0.7), sample([1, 2, 3, 4, 5]), sample([7, 8], trained=0)]
    (found,) = asyncio.run(scores_of(MadeUpEngine("http://none"), [ConsumedGroup("g", 5, 9, samples)]))
    assert found[0].tolist() == [-1, -2, -3]
    assert np.isnan(found[1]).all()
    assert np.isnan(found[2]).all()
    assert found[3].tolist() == [0, 0]
    assert [len(field) for field in found] == [3, 2, 5, 2]
    hot, long = caplog.messages
    assert "g-5-1 gets no teacher_logprobs" in hot
    assert "temperature 0.7" in hot
    assert "longer than the context" in long


def test_the_samples_of_all_groups_are_asked_for_at_once() -> None:
    class Patient(MadeUpEngine):
        """Answers nothing before both samples with trained tokens have been asked for."""

        together: asyncio.Barrier

        async def score(self, tokens: list[int], rid: str) -> np.ndarray:
            await self.together.wait()
            return await super().score(tokens, rid)

    groups = [ConsumedGroup("g", 5, 9, [sample([1, 2]), sample([3], trained=0)]), ConsumedGroup("h", 6, 9, [sample([4, 4])])]

    async def score() -> list[list[np.ndarray]]:
        engine = Patient("http://none")
        engine.together = asyncio.Barrier(2)
        return await asyncio.wait_for(scores_of(engine, groups), 5)

    assert [[field.tolist() for field in group] for group in asyncio.run(score())] == [[[-1, -2], [0]], [[-4, -4]]]


def test_a_teacher_that_nobody_waits_for_is_refused() -> None:
    waiting = {"broker.required_fields": ["teacher_logprobs"]}
    assert not teacher_problems(resolve(None, waiting, {}), "http://x")
    (found,) = teacher_problems(resolve(None, {}, {}), "http://x")
    assert found.startswith("broker.required_fields: teacher_logprobs is not among them")
    (found,) = teacher_problems(resolve(None, {**waiting, "rollout.rollout_temperature": 0.7}, {}), "http://x")
    assert found.startswith("rollout.rollout_temperature: 0.7, but engines score")
    done = CliRunner().invoke(root, ["config", "check", "--teacher", "http://x", "--rollout-temperature", "0.7"])
    assert "teacher_logprobs is not among them" in str(done.exception)
    assert "0.7, but engines score" in str(done.exception)

import asyncio
import re
from typing import Any

import numpy as np
import pytest

from rollout.plugins import Plugin
from rollout.response import Response, Task
from rollout.rewards import exact, math, random, registry, scoring
from slimebus.bus.errors import UsageError


def response(text: str, label: Any = "", *, finish: str = "stop", reward: float | None = None) -> Response:
    task = Task(prompt="p", prompt_ids=np.array([1], np.int32), sampling={}, label=label)
    ids = np.arange(3, dtype=np.int32)
    return Response(task=task, token_ids=ids, logprobs=np.zeros(3), versions=[(0, 3)], text=text, finish_reason=finish, reward=reward)


@pytest.mark.parametrize(
    ("text", "label", "expected"),
    [
        ("so it is \\boxed{42}", "42", 1.0),
        ("\\boxed{1} no, \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("work\n#### 1,234", "#### 1234", 1.0),
        ("the total is 18 dollars and 2.50 cents", "2.5", 1.0),
        ("$7.00", "7", 1.0),
        ("3/4", "0.75", 1.0),
        ("the answer is 41", "42", 0.0),
        ("no number at all", "42", 0.0),
        ("\\boxed{1/0}", "5", 0.0),
        ("\\boxed{1e999999999}", "5", 0.0),
        ("\\boxed{1e-9999_99999}", "0", 0.0),
        ("\\boxed{1e3}", "1000", 1.0),
        ("\\boxed{unclosed 42", "42", 1.0),
    ],
)
def test_math_compares_the_final_answer(text: str, label: str, expected: float) -> None:
    assert math.reward(response(text, label)) == expected


def test_exact_wants_the_label_and_an_end() -> None:
    assert exact.reward(response(" yes ", "yes")) == 1.0
    assert exact.reward(response("yes", "yes", finish="length")) == 0.0
    assert exact.reward(response("yes!", "yes")) == 0.0


def test_random_is_the_same_for_the_same_tokens() -> None:
    assert random.reward(response("a")) == random.reward(response("b"))


def test_an_unknown_built_in_reward_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no built-in reward 'mth'; expected one of exact, math, random"):
        registry.find("mth", "", None)


def score(reward: Any, made: list[Response], timeout_s: float = 5.0) -> list[Any]:
    return asyncio.run(scoring.score(Plugin("reward a:b", reward), made, timeout_s))


def test_a_reward_that_raises_fails_its_sample_alone() -> None:
    def fussy(r: Response) -> float:
        if r.text == "bad":
            raise ValueError("cannot read this")
        return 1.0

    made = [response("good"), response("bad")]
    problems = score(fussy, made)
    assert (made[0].reward, made[1].reward) == (1.0, None)
    assert problems[0] is None
    assert re.fullmatch(r"reward a:b failed at .*/test_rewards.py:\d+: ValueError: cannot read this", problems[1].text)


@pytest.mark.parametrize("value", ["1.0", None, float("nan"), [1]])
def test_what_is_no_number_is_no_reward(value: Any) -> None:
    (problem,) = score(lambda r: value, [response("x")])
    assert problem is not None
    assert "expected a number within +-1e+30" in problem.text


def test_a_coroutine_reward_is_awaited_for_all_at_once_and_cut_off_in_time() -> None:
    async def slow(r: Response) -> float:
        await asyncio.sleep(0 if r.text == "fast" else 30)
        return 0.5

    made = [response("fast"), response("slow")]
    problems = score(slow, made, timeout_s=0.05)
    assert made[0].reward == 0.5
    assert [p and "took longer than reward_timeout_s" in p.text for p in problems] == [None, True]


def test_a_response_that_brings_its_reward_keeps_it() -> None:
    made = [response("x", reward=0.25)]
    assert score(lambda r: 9.0, made) == [None]
    assert made[0].reward == 0.25

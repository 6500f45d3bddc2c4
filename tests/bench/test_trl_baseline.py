"""The parts of tests/bench/trl_baseline.py that need no TRL: what it rewards, what it reports."""

import pytest
import trl_baseline as baseline


class Letters:
    """A tokenizer of five tokens: id 0 ends, ids 1 to 4 are `>`, `9`, `9` and `2`."""

    eos_token_id = 0
    text = "?>992"

    def decode(self, ids: list[int]) -> str:
        return "".join(self.text[i] for i in ids)


def test_reward_needs_the_stop_token_and_the_exact_sum() -> None:
    score = baseline.recipe_reward(Letters())
    assert score([1, 2, 3, 4, 0], "992") == 1.0
    assert score([1, 2, 3, 4], "992") == 0.0
    assert score([1, 2, 3, 4, 0], "993") == 0.0
    assert score([], "992") == 0.0


def test_answers_are_cut_behind_the_first_stop_token() -> None:
    assert baseline.until_end([5, 6, 0, 0, 0], 0) == [5, 6, 0]
    assert baseline.until_end([5, 6], 0) == [5, 6]


def test_result_leaves_out_the_first_step_and_finds_when_the_goal_was_reached() -> None:
    line = baseline.result([9.0, 1.0, 3.0], [(0, 0.0, 0.4), (2, 10.0, 0.9), (3, 13.0, 0.95)])
    assert line == {"samples_per_s": 32 * 8 / 2.0, "time_to_090_s": 10.0}


def test_goal_never_reached_is_null_and_one_between_two_evaluations_is_on_a_line() -> None:
    assert baseline.time_to_goal([(0, 0.0, 0.4)]) is None
    assert baseline.time_to_goal([(0, 0.0, 0.4), (2, 10.0, 0.8), (4, 30.0, 1.0)]) == pytest.approx(20.0)

"""Group-normalised advantages against numbers worked out by hand."""

import numpy as np
import pytest

from trainer.objective.group_rewards import grpo_advantages


def test_one_right_of_four_by_hand():
    # mean 1/4, population variance 3/16, std 0.4330127
    got = grpo_advantages(np.array([1.0, 0.0, 0.0, 0.0]))
    assert got == pytest.approx([0.75 / 0.4331127, *[-0.25 / 0.4331127] * 3])


def test_without_std_only_the_mean_is_subtracted():
    assert grpo_advantages(np.array([2.0, 0.0]), std_normalization=False) == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("rewards", [[0.1] * 7, [1.0], [], [0.0, 0.0]])
def test_equal_rewards_give_exactly_zero(rewards):
    assert not grpo_advantages(np.array(rewards)).any()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_advantages_of_any_group_size_sum_to_zero(size):
    got = grpo_advantages(np.arange(size, dtype=float) ** 2)
    assert got.sum() == pytest.approx(0.0, abs=1e-5)
    assert got.std() == pytest.approx(1.0, rel=1e-3)


def test_samples_of_one_trajectory_count_as_one_in_mean_and_deviation_by_hand():
    # one attempt in three turns, rewarded 1, and one in a single turn, rewarded 0: mean 1/2, std 1/2
    got = grpo_advantages(np.array([1.0, 1.0, 1.0, 0.0]), np.array([1 / 3, 1 / 3, 1 / 3, 1.0]))
    assert got == pytest.approx([*[0.5 / 0.5001] * 3, -0.5 / 0.5001])

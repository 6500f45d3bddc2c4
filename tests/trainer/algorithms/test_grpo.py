"""Group-normalised advantages against numbers worked out by hand."""

import numpy as np
import pytest

from trainer.algorithms.grpo import grpo_advantages


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

"""Every algorithm trains a model, through all that a trainer does with a batch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimebus.config.schema import AlgorithmConfig
from trainer.objective.plugin_settings import plugin_names


def with_fields(groups: list[Any]) -> list[Any]:
    """Groups whose samples have all that an algorithm may need."""
    for group in groups:
        for sample in group.samples:
            right = np.full(len(sample.tokens), 2 * sample.reward - 1, np.float32)
            sample.extras = {"values": right / 4, "teacher_logprobs": sample.rollout_logprobs + right}
    return groups


@pytest.mark.parametrize("name", plugin_names("algorithms"))
def test_it_raises_the_probability_of_what_was_good(name: str, tied_model: Path, make_batch: Any, build_policy: Any) -> None:
    def good_against_bad() -> float:
        logprobs, groups = policy.logprobs(make_batch()), make_batch()
        samples = [sample for group in groups for sample in group.samples]
        means = [p[sample.loss_mask > 0].mean() * (2 * sample.reward - 1) for p, sample in zip(logprobs, samples, strict=True)]
        return float(np.mean(means))

    policy = build_policy(tied_model, algorithm=AlgorithmConfig(advantage_estimator=name))
    batch = with_fields(make_batch())
    if name == "precomputed":
        for sample in (sample for group in batch for sample in group.samples):
            sample.extras = {"advantages": np.array([2 * sample.reward - 1], np.float32)}
    before = good_against_bad()
    made = [policy.train(batch, num_steps=2) for _ in range(3)]
    assert [metrics["updated"] for metrics in made] == [2, 2, 2]
    assert all(math.isfinite(value) for metrics in made for value in metrics.values())
    assert name == "sft" or good_against_bad() > before


def test_a_resting_policy_stays_as_it_is(tied_model: Path, make_batch: Any, build_policy: Any) -> None:
    settings = {"num_critic_only_steps": 1}
    policy = build_policy(tied_model, algorithm=AlgorithmConfig(advantage_estimator="ppo", entropy_coef=0.1, settings=settings))
    before = policy.logprobs(make_batch())
    policy.train(with_fields(make_batch()), version=0)
    assert all(np.array_equal(a, b) for a, b in zip(before, policy.logprobs(make_batch()), strict=True))
    policy.train(with_fields(make_batch()), version=1)
    assert not all(np.array_equal(a, b) for a, b in zip(before, policy.logprobs(make_batch()), strict=True))

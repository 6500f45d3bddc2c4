"""How a fetched batch is trained: every group once, in parts, whatever its size."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from slimebus.messages import NO_VERSION
from slimebus.samples import Sample
from trainer.bus import StepBatch
from trainer.feed import FetchedBatch, FetchedGroup
from trainer.policy import Policy
from trainer.step_plan import StepPlan


def sample(reward: float, length: int = 6, version: int = 3) -> Sample:
    tokens = np.arange(length, dtype=np.int32) % 30
    mask = np.array([0, *[1] * (length - 1)], np.uint8)
    versions = [(NO_VERSION, 1), (version, length - 1)]
    return Sample(tokens=tokens, loss_mask=mask, rollout_logprobs=np.full(length, -1.0, np.float32), versions=versions, reward=reward)


def batch(sizes: list[int], next_version: int = 4) -> StepBatch:
    """One group for each size, of so many samples; their rewards alternate."""
    groups = [FetchedGroup(str(i), [sample(float(k % 2), 4 + i + k) for k in range(n)]) for i, n in enumerate(sizes)]
    return StepBatch(FetchedBatch(step=7, version=3, next_version=next_version, groups=groups, lags=[0] * sum(sizes)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
def test_parts_hold_every_group_once_and_are_almost_equal(count: int) -> None:
    parts = batch([2] * 7).parts(count)
    assert [group.id for part in parts for group in part] == list("0123456")
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_batch_of_fewer_groups_than_parts_has_fewer_parts() -> None:
    plan = batch([2, 2]).plan(max_parts=4)
    assert plan == StepPlan(num_parts=2, publishes=True)
    assert [len(part) for part in batch([2, 2]).parts(plan.num_parts)] == [1, 1]


def test_a_version_is_published_when_the_broker_says_that_the_next_step_trains_it() -> None:
    assert batch([2], next_version=4).plan(1).publishes
    assert not batch([2], next_version=3).plan(1).publishes


def test_batches_of_changing_numbers_of_groups_and_samples_are_trained_by_one_policy(
    build_policy: Callable[..., Policy], tied_model: Any
) -> None:
    policy = build_policy(tied_model)
    for sizes in ([4, 4, 4, 4], [2] * 5, [8], [2, 3, 5, 2, 2, 2]):
        step = batch(sizes)
        trained = [policy.train(part) for part in step.parts(step.plan(2).num_parts)]
        assert sum(metrics["samples"] for metrics in trained) == sum(sizes)
        assert all(np.isfinite(metrics["loss"]) and metrics["updated"] for metrics in trained)


def test_the_loss_is_the_mean_over_trained_tokens_whatever_the_number_of_groups(
    build_policy: Callable[..., Policy], tied_model: Any
) -> None:
    once, twice = batch([4]).groups, [*batch([4]).groups, *batch([4]).groups]
    assert build_policy(tied_model).train(once)["grad_norm"] == pytest.approx(build_policy(tied_model).train(twice)["grad_norm"], rel=1e-4)

"""How a fetched batch is trained: every group once, in parts, whatever its size."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from made_samples import made

from slimebus.bus.messages import NO_VERSION
from slimebus.bus.samples import Sample
from trainer.batches.batch import TrainingGroup
from trainer.model.policy import Policy
from trainer.session.step_batch import IdleSteps, StepBatch, StepPlan


def sample(reward: float, length: int = 6, version: int = 3) -> Sample:
    return made((NO_VERSION, 1), (version, length - 1), reward=reward, mask=[0, *[1] * (length - 1)])


def batch(sizes: list[int], next_version: int = 4) -> StepBatch:
    """One group for each size, of so many samples; their rewards alternate."""
    groups = [TrainingGroup(str(i), [sample(float(k % 2), 4 + i + k) for k in range(n)]) for i, n in enumerate(sizes)]
    return StepBatch(step=7, version=3, next_version=next_version, groups=groups, lags=[0] * sum(sizes))


def test_a_batch_of_fewer_groups_than_optimizer_steps_has_fewer_steps() -> None:
    assert batch([2, 2]).plan([0.4, 0.3, 0.2, 0.1]) == StepPlan(2, (0.4, 0.3), publishes=True)
    assert batch([2, 2]).plan([0.6, 0.5, 0.4, 0.3, 0.2, 0.1], 2) == StepPlan(2, (0.6, 0.5, 0.4, 0.3), publishes=True)


def test_recorded_learning_rates_go_before_the_schedule_where_there_is_one_for_each_step() -> None:
    step = msgspec.structs.replace(batch([2, 2]), learning_rates=(0.04, 0.03))
    assert step.plan([0.4, 0.3]).learning_rates == step.record()["learning_rates"] == (0.04, 0.03)
    assert step.plan([0.4]).learning_rates == step.record()["learning_rates"] == (0.4,)


def test_a_version_is_published_when_the_broker_says_that_the_next_step_trains_it() -> None:
    assert batch([2], next_version=4).plan([0.1]).publishes
    assert not batch([2], next_version=3).plan([0.1]).publishes


def test_batches_of_changing_numbers_of_groups_and_samples_are_trained_by_one_policy(
    build_policy: Callable[..., Policy], tied_model: Any
) -> None:
    policy = build_policy(tied_model)
    for sizes in ([4, 4, 4, 4], [2] * 5, [8], [2, 3, 5, 2, 2, 2]):
        step = batch(sizes)
        num_steps = step.plan([0.1, 0.1]).num_steps
        metrics = policy.train(step.groups, num_steps=num_steps)
        assert (metrics["samples"], metrics["updated"]) == (sum(sizes), num_steps)
        assert np.isfinite(metrics["loss"])


def test_the_loss_is_the_mean_over_trained_tokens_whatever_the_number_of_groups(
    build_policy: Callable[..., Policy], tied_model: Any
) -> None:
    once, twice = batch([4]).groups, [*batch([4]).groups, *batch([4]).groups]
    assert build_policy(tied_model).train(once)["grad_norm"] == pytest.approx(build_policy(tied_model).train(twice)["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(("reward", "what"), [(0.0, "all rewards are 0.0"), (None, "the samples of each group have equal rewards")])
def test_steps_that_train_nothing_are_warned_of_at_the_fifth_in_a_row_and_ever_more_seldom(reward: float | None, what: str) -> None:
    flat, learning, idle = batch([2, 2]), batch([2, 2]), IdleSteps()
    for group in flat.groups:
        group.has_gradient = False
        for one in group.samples:
            one.reward = one.reward if reward is None else reward
    assert not any(idle.warning(one) for one in [flat, flat, flat, flat, learning, flat, flat, flat, flat])
    said = {i: text for i in range(5, 41) if (text := idle.warning(flat))}
    assert list(said) == [5, 10, 20, 40]
    assert f"nothing was trained in the last 20 steps: {what}" in said[20]

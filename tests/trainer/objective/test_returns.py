"""Returns, advantages and value losses of tokens against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from loss_rows import batch_of

from slimebus.config.schema import AlgorithmConfig
from trainer.batches.batch import Batch
from trainer.critic.critic import value_loss
from trainer.objective.returns import discounted_sums, gae, token_rewards, whitened


def trained(batch: Batch, values: np.ndarray) -> list[float]:
    assert not values[batch["loss_mask"] == 0].any()
    return [float(value) for value in values[batch["loss_mask"] > 0]]


def test_the_reward_is_at_the_last_token_and_a_sample_without_tokens_has_none() -> None:
    batch = batch_of([2, 0, 1], reward=[3.0, 7.0, -1.0])
    assert trained(batch, token_rewards(batch, AlgorithmConfig())) == [0.0, 3.0, -1.0]


def test_the_kl_is_a_reward_of_each_token() -> None:
    batch = batch_of([2], reward=[1.0], rollout_logprobs=[-1.0, -2.0], reference_logprobs=[-1.5, -1.0])
    assert trained(batch, token_rewards(batch, AlgorithmConfig(kl_coef=0.1, kl_loss_type="k1"))) == pytest.approx([-0.05, 1.1])


def test_discounted_sums_end_with_their_sample() -> None:
    batch = batch_of([3, 0, 1, 2], x=[0.0, 4.0, 1.0, 5.0, 2.0, 8.0])
    assert trained(batch, discounted_sums(batch, batch["x"], 0.5)) == [2.25, 4.5, 1.0, 5.0, 6.0, 8.0]
    assert trained(batch, discounted_sums(batch, batch["x"], 0.0)) == [0.0, 4.0, 1.0, 5.0, 2.0, 8.0]


def test_generalized_advantages_by_hand() -> None:
    batch = batch_of([2, 1], values=[0.5, 0.25, 2.0], r=[0.0, 1.0, 0.0])
    advantages, returns = gae(batch, batch["r"], batch["values"], gamma=1.0, lambd=0.5)
    assert trained(batch, advantages) == pytest.approx([-0.25 + 0.5 * 0.75, 0.75, -2.0])
    assert trained(batch, returns) == pytest.approx([0.625, 1.0, 0.0])


def test_with_lambda_1_the_returns_are_the_discounted_rewards_whatever_the_values() -> None:
    batch = batch_of([3], values=[5.0, -3.0, 2.0], r=[1.0, 0.0, 2.0])
    _, returns = gae(batch, batch["r"], batch["values"], gamma=0.5, lambd=1.0)
    assert trained(batch, returns) == pytest.approx(trained(batch, discounted_sums(batch, batch["r"], 0.5)))


def test_whitened_over_all_tokens_and_zero_where_all_are_equal() -> None:
    batch = batch_of([1, 2, 0], x=[1.0, 3.0, 3.0])
    assert trained(batch, whitened(batch, batch["x"])) == pytest.approx([-(2**0.5), 0.5**0.5, 0.5**0.5])
    assert not whitened(batch, batch["loss_mask"] * 0.1).any()
    assert not whitened(batch_of([0]), np.full(1, np.nan)).any()


def test_values_that_are_masked_need_not_be_finite() -> None:
    batch = batch_of([2], values=[0.5, 0.25], r=[0.0, 1.0])
    values = np.where(batch["loss_mask"] > 0, batch["values"], np.inf)
    advantages, _ = gae(batch, batch["r"], values, gamma=1.0, lambd=1.0)
    assert trained(batch, advantages) == pytest.approx([0.5, 0.75])


@pytest.mark.parametrize(
    ("value", "target", "loss", "clipped", "gradient"),
    [
        (1.1, 3.0, 1.805, 0, -1.9),  # within 0.2 of the old value 1
        (2.0, 3.0, 1.62, 1, 0.0),  # beyond, towards its target: (1.2 - 3)^2 / 2, no gradient
        (2.0, 1.0, 0.5, 0, 1.0),  # beyond, away from its target
    ],
)
def test_value_loss_by_hand(value: float, target: float, loss: float, clipped: float, gradient: float) -> None:
    values = torch.tensor([value], requires_grad=True)
    got, flag = value_loss(values, torch.tensor([1.0]), torch.tensor([target]), 0.2)
    got.sum().backward()
    assert values.grad is not None
    assert (got.item(), flag.item(), values.grad.item()) == pytest.approx((loss, clipped, gradient))

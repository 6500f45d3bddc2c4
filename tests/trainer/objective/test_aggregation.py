"""What each token weighs, by hand; and sums over sequences, whatever the packing."""

import math

import numpy as np
import pytest
import torch
from loss_rows import batch_of, in_order, row_of

from trainer.batches.batch import Batch
from trainer.objective.aggregation import AGGREGATIONS, masked_sum, token_weights

LOSS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
"""Of six tokens: samples of one and two, which are one trajectory; one of one in the same group; one of two in another."""


def uneven() -> Batch:
    return batch_of([1, 2, 1, 2], groups=[0, 0, 0, 1], trajectory=[0, 0, 1, 0])


@pytest.mark.parametrize(
    ("aggregation", "loss"),
    [
        ("token", 63 / 6),
        ("sequence", (7 / 3 + 8 + 48 / 2) / 3),
        ("group", (15 / 4 + 48 / 2) / 2),
        ("constant", 63 / (3 * 10)),
    ],
)
def test_each_aggregation_by_hand(aggregation: str, loss: float) -> None:
    batch = uneven()
    weights = token_weights(batch, aggregation, 10)
    assert weights[batch.starts].tolist() == [0] * 4  # first tokens are not trained
    assert float(np.dot(weights[batch["loss_mask"] > 0], LOSS)) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_trajectory_or_group_without_a_trained_token_counts_in_no_denominator(aggregation: str) -> None:
    batch = uneven()
    masked = batch.with_columns({"loss_mask": np.where(np.arange(batch.num_tokens) < batch.ends[2], np.float32(0), batch["loss_mask"])})
    alone = masked.select(np.array([3]))
    assert token_weights(masked, aggregation, 10)[batch.starts[3] :] == pytest.approx(token_weights(alone, aggregation, 10))
    nothing = alone.with_columns({"loss_mask": np.zeros(alone.num_tokens, np.float32)})
    assert not token_weights(nothing, aggregation, 10).any()


def test_sums_and_means_of_sequences_by_hand_and_their_gradient() -> None:
    row = row_of(uneven(), LOSS)
    assert in_order(row, row.sequence_sum(row.new_logprobs)) == [1, 6, 6, 8, 48, 48]
    mean = row.sequence_mean(row.new_logprobs)
    assert in_order(row, mean) == [1, 3, 3, 8, 24, 24]
    (mean * torch.arange(6.0)[row.order.argsort()][None]).sum().backward()  # type: ignore[attr-defined]
    assert row.leaf.grad[row.order].tolist() == [0, 1.5, 1.5, 3, 4.5, 4.5]  # type: ignore[attr-defined]


def test_what_is_masked_is_in_no_sum_and_spoils_no_gradient_even_when_infinite() -> None:
    batch = batch_of([3], rollout_logprobs=[-1.0, math.nan, -math.inf])
    mask = batch["loss_mask"].copy()
    mask[2:] = 0
    row = row_of(batch.with_columns({"loss_mask": mask}), [-1.5, -1.0, -2.0])
    ratio = row.sequence_mean(row.new_logprobs - row.rollout_logprobs).exp() + (row.new_logprobs - row.rollout_logprobs).exp()
    assert ratio[0, 0].item() == pytest.approx(2 * math.exp(-0.5))
    masked_sum(ratio, row.loss_mask).backward()
    assert row.leaf.grad.tolist() == pytest.approx([2 * math.exp(-0.5), 0, 0])  # type: ignore[attr-defined]

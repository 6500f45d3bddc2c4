"""Rows: every token once, within the budget, the same number on every rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_samples import made
from msgspec.structs import replace

from trainer.batches.batch import TrainingGroup
from trainer.batches.flatten import flatten
from trainer.batches.packed_layout import PackedLayout
from trainer.batches.packing import RankLayout, pack, plan_rows

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def batch_of(lengths):
    samples = [made((0, length)) for length in lengths]
    return flatten([TrainingGroup("g", [replace(sample, tokens=sample.tokens + 100 * i) for i, sample in enumerate(samples)])])


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 80))
def test_every_sample_is_in_one_row_and_ranks_have_equally_many_rows(lengths, dp_size, max_tokens):
    rows = plan_rows(np.array(lengths), dp_size, max_tokens)
    assert len(rows) == dp_size
    assert len({len(rank) for rank in rows}) == 1
    assert sorted(int(i) for rank in rows for row in rank for i in row) == list(range(len(lengths)))
    for rank in rows:
        for row in rank:
            assert len(row) <= 1 or sum(lengths[i] for i in row) <= max_tokens


def first_fit_decreasing(lengths, max_tokens):
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= max_tokens), None)
        rows.append([length]) if row is None else row.append(length)
    return len(rows)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(60, 120))
def test_rows_are_as_few_as_those_of_first_fit_decreasing_rounded_up_to_the_ranks(lengths, dp_size, max_tokens):
    rows = plan_rows(np.array(lengths), dp_size, max_tokens)
    assert len(rows[0]) <= -(-first_fit_decreasing(lengths, max_tokens) * 1.25 // dp_size)


def test_what_fits_two_rows_gets_two():
    (rows,) = plan_rows(np.array([60, 60, 40, 40]), 1, 100)
    assert sorted(sorted(row.tolist()) for row in rows) == [[0, 2], [1, 3]] or sorted(sorted(row.tolist()) for row in rows) == [
        [0, 3],
        [1, 2],
    ]


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(4, 8192), (16, 32768)])
def test_rows_of_long_tailed_lengths_are_full_and_ranks_in_step(dp_size, max_tokens):
    draw = np.random.default_rng(0)
    lengths = np.minimum(max_tokens, draw.lognormal(np.log(max_tokens / 6), 0.9, 1024) + 200).astype(np.int64)
    rows = plan_rows(lengths, dp_size, max_tokens, attention_tokens=24_000)
    fewest = -(-first_fit_decreasing(lengths.tolist(), max_tokens) // dp_size) * dp_size
    assert fewest / sum(len(rank) for rank in rows) >= 0.95
    tokens = np.array([[lengths[row].sum() for row in rank] for rank in rows])
    assert tokens.max(axis=0).sum() * dp_size / lengths.sum() < 1.05  # what ranks that wait for each other at each row compute
    cost = lengths + lengths**2 / 24_000
    of_ranks = np.array([sum(cost[row].sum() for row in rank) for rank in rows])
    assert of_ranks.max() / of_ranks.mean() < 1.02


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(1, 3))
def test_every_target_is_predicted_once_from_the_token_before(lengths, shape, dp_size):
    batch, seen = batch_of(lengths), []
    for dp_rank in range(dp_size):
        for cp_rank in range(shape[0]):
            layout = RankLayout(dp_size=dp_size, dp_rank=dp_rank, cp_size=shape[0], cp_rank=cp_rank, sp_size=shape[1])
            for row in pack(batch, range(len(lengths)), 50, layout):
                assert row.tokens.shape[1] % shape[1] == 0
                real = row.is_real[0]
                assert torch.equal(row.targets[0][real], row.tokens[0][real] + 1)
                assert torch.equal(row.positions[0][real], row.tokens[0][real] % 100)
                assert not row.loss_mask[0][~real].any()
                seen += row.source[0][real].tolist()
    firsts = set(batch.starts.tolist())
    assert sorted(seen) == [i for i in range(batch.num_tokens) if i not in firsts]


def test_a_rank_with_nothing_to_do_gets_a_masked_row():
    rows, other = (pack(batch_of([5]), [0], 50, RankLayout(dp_size=2, dp_rank=rank)) for rank in (0, 1))
    assert len(rows) == len(other) == 1
    assert sorted([float(rows[0].loss_mask.sum()), float(other[0].loss_mask.sum())]) == [0.0, 4.0]


def test_a_row_for_context_parallelism_is_as_large_as_its_tokens():
    """No mask of each query and key waits in it: of 64 rows of 65,536 tokens these would take 64 GiB."""
    layout = PackedLayout([4096], cp_size=2, cp_rank=0)
    held = [thing for part in (layout, *layout.runs) for thing in vars(part).values() if isinstance(thing, torch.Tensor)]
    assert max(tensor.nbytes for tensor in held) == 8 * 4096
    mask = layout.runs[0].causal_mask()
    assert mask.shape == (1, 1, 2048, 4096)
    assert [int(row.sum()) for row in mask[0, 0, [0, 1023, 1024, 2047]]] == [1, 1024, 3073, 4096]

"""Rows: every token once, within the budget, the same number on every rank."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batch import Group, Sample, flatten
from trainer.packing import RowRules, pack, plan_rows

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=30)


def batch_of(lengths):
    samples = [
        Sample(np.arange(n, dtype=np.int32) + 100 * i, np.ones(n, np.uint8), np.full(n, -1.0, np.float32)) for i, n in enumerate(lengths)
    ]
    return flatten([Group("g", samples)], [np.ones(len(samples))], vocab_size=10**6)


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


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]), st.integers(1, 3))
def test_every_target_is_predicted_once_from_the_token_before(lengths, shape, dp_size):
    batch, seen = batch_of(lengths), []
    for dp_rank in range(dp_size):
        for cp_rank in range(shape[0]):
            rules = RowRules(cp_size=shape[0], cp_rank=cp_rank, sp_size=shape[1])
            for row in pack(
                batch, range(len(lengths)), dp_size=dp_size, dp_rank=dp_rank, max_tokens=50, rules=rules, device=torch.device("cpu")
            ):
                assert row.tokens.shape[1] % shape[1] == 0
                real = row.is_real[0]
                assert torch.equal(row.targets[0][real], row.tokens[0][real] + 1)
                assert torch.equal(row.positions[0][real], row.tokens[0][real] % 100)
                assert not row.loss_mask[0][~real].any()
                seen += row.source[0][real].tolist()
    firsts = set(batch.starts.tolist())
    assert sorted(seen) == [i for i in range(len(batch.tokens)) if i not in firsts]


def test_a_rank_with_nothing_to_do_gets_a_masked_row():
    rows = pack(batch_of([5]), [0], dp_size=2, dp_rank=0, max_tokens=50, rules=RowRules(), device=torch.device("cpu"))
    other = pack(batch_of([5]), [0], dp_size=2, dp_rank=1, max_tokens=50, rules=RowRules(), device=torch.device("cpu"))
    assert len(rows) == len(other) == 1
    assert sorted([float(rows[0].loss_mask.sum()), float(other[0].loss_mask.sum())]) == [0.0, 4.0]


def test_arrays_of_different_length_are_refused_by_name():
    from slimebus.errors import DataError

    bad = Group("p7", [Sample(np.zeros(3, np.int32), np.zeros(2, np.uint8))])
    with pytest.raises(DataError, match="group p7 sample 0: loss_mask has 2 entries for 3 tokens"):
        flatten([bad], [np.zeros(1)], vocab_size=10)

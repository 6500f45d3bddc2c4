"""Norm, rotary embedding and packed attention against plain torch, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from trainer.batches.packed_layout import PackedLayout, packed_parameters, zigzag_positions
from trainer.compat.attention import PackedAttention, rotate
from trainer.compat.te_compat import rms_norm


@pytest.fixture
def attention():
    """Without Megatron's parallel state."""
    made = PackedAttention.__new__(PackedAttention)
    torch.nn.Module.__init__(made)
    made.dropout, made.scale = 0.0, None
    return made


def assert_same(mine, naive, *inputs):
    """Equal values, and equal gradients of a random projection."""
    results = []
    for function in (mine, naive):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        torch.manual_seed(1)
        (out * torch.randn(out.shape)).sum().backward()
        results.append([out, *[leaf.grad for leaf in leaves]])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def test_rms_norm():
    torch.manual_seed(0)
    assert_same(lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: F.rms_norm(x, w.shape, w, 1e-6), torch.randn(5, 3, 8), torch.randn(8))


def test_rotation_by_the_opposite_angle_is_its_inverse():
    torch.manual_seed(0)
    x, angles = torch.randn(6, 2, 8), torch.randn(6, 1, 4).repeat(1, 1, 2)
    there = rotate(x, angles.cos(), angles.sin(), 1)
    torch.testing.assert_close(rotate(there, angles.cos(), angles.sin(), -1), x)


@pytest.mark.parametrize("lengths", [[3, 3], [1, 4, 2], [5], [200, 30], [128, 129], [9, 12, 300, 310, 40]])
def test_packed_attention_equals_each_sequence_alone(lengths, attention):
    torch.manual_seed(0)
    parameters, total = packed_parameters(lengths), sum(lengths)

    def packed(q, k, v):
        return attention(q, k, v, packed_seq_params=parameters)

    def alone(q, k, v):
        outs = []
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            b, c = (x.repeat_interleave(2, 1) for x in (b, c))
            weights = (torch.einsum("qhd,khd->hqk", a, b) / 4**0.5).masked_fill(torch.ones(len(a), len(a)).triu(1) > 0, -1e9).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, c).flatten(1))
        return torch.cat(outs)

    assert_same(packed, alone, torch.randn(total, 4, 4), torch.randn(total, 2, 4), torch.randn(total, 2, 4))


@pytest.mark.parametrize(
    ("lengths", "runs"),
    [
        ([5], [1]),
        ([30, 40, 50], [3]),  # padding costs less than a run more
        ([9, 12, 300, 310, 40], [2, 2, 1]),
        ([420, 425, 430, 480], [3, 1]),
        ([10] * 100, [100]),
    ],
)
def test_neighbours_are_attended_to_together_where_padding_costs_less_than_a_run_more(lengths, runs):
    layout = PackedLayout(lengths)
    assert [run.num_sequences for run in layout.runs] == runs
    assert sum(layout.sizes) == sum(lengths)


@pytest.mark.parametrize("cp_rank", [0, 1])
def test_a_context_parallel_rank_attends_to_the_whole_sequences_of_several_runs(cp_rank, attention):
    lengths, held = [8, 12, 300, 320], zigzag_positions([8, 12, 300, 320], 2, cp_rank)
    parameters = packed_parameters(lengths, cp_size=2, cp_rank=cp_rank)
    assert len(parameters.cu_seqlens_q.packed_layout.runs) == 2
    torch.manual_seed(0)
    q, k, v = torch.randn(640, 4, 4), torch.randn(640, 2, 4), torch.randn(640, 2, 4)
    attention.whole_sequences = lambda x, layout: x
    mine, whole = attention(q[held], k, v, packed_seq_params=parameters), attention(q, k, v, packed_seq_params=packed_parameters(lengths))
    torch.testing.assert_close(mine, whole[held], atol=2e-5, rtol=1e-4)

"""Norm, rotary embedding and packed attention against plain torch, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from trainer.batches.packed_layout import PackedLayout
from trainer.compat.attention import PackedAttention, collect, rotate, spread
from trainer.compat.norm import rms_norm


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


@pytest.mark.parametrize("lengths", [[3, 3], [1, 4, 2], [5], [200, 30], [128, 129]])
def test_packed_attention_equals_each_sequence_alone(lengths):
    torch.manual_seed(0)
    layout, total = PackedLayout(lengths), sum(lengths)

    def packed(q, k, v):
        width = layout.num_sequences, layout.width
        attend = PackedAttention.attend
        frame = torch.nn.Module()
        frame.dropout, frame.scale = 0.0, None
        out = attend(frame, *(spread(x, layout.key_slots, *width) for x in (q, k, v)), None)
        return collect(out, layout.key_slots)

    def alone(q, k, v):
        outs = []
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            b, c = (x.repeat_interleave(2, 1) for x in (b, c))
            weights = (torch.einsum("qhd,khd->hqk", a, b) / 4**0.5).masked_fill(torch.ones(len(a), len(a)).triu(1) > 0, -1e9).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, c).flatten(1))
        return torch.cat(outs)

    assert_same(packed, alone, torch.randn(total, 4, 4), torch.randn(total, 2, 4), torch.randn(total, 2, 4))

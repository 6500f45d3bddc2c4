"""Core attention and rotary embedding for megatron-core specs without Transformer Engine; causal only.

Does what megatron's own DotProductAttention refuses: packed rows (thd) and context parallelism. Sequences of a packed row that are
about equally long are spread to a padded batch, given to one scaled_dot_product_attention call, and gathered back: a few calls for 256
short sequences instead of 256.

t  tokens of a packed row on this rank    n  its sequences    L  the longest of them    h  heads on this rank    d  head size
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from trainer.batches.packed_layout import PackedLayout, Run

LONGEST = 128
"""Tokens of a sequence up to which forming all its weights is faster on a CPU than torch's flash kernel, which is made for long ones: 7.1
against 9.3 ms for forward and backward of 100 sequences of 40, and slower from 200 on."""


class ShortAttention(torch.autograd.Function):
    """Causal attention as batched products. The r query heads that share one of g key heads are rows of one: [n * g, r * L, d] against
    [n * g, L, d].
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float) -> torch.Tensor:
        weights = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scale).softmax(-1)
        ctx.save_for_backward(query, key, value, weights)
        ctx.scale = scale
        return torch.bmm(weights, value)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        query, key, value, weights = ctx.saved_tensors
        grad_value = torch.bmm(weights.transpose(1, 2), grads[0])
        grad_weights = torch.bmm(grads[0], value.transpose(1, 2))
        grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype).mul_(ctx.scale)
        return torch.bmm(grad_scores, key), torch.bmm(grad_scores.transpose(1, 2), query), grad_value, None, None


def short_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of query [n, h, L, d] over key and value [n, g, L, d]; [n, h, L, d]."""
    n, heads, length, size = query.shape
    groups = key.shape[1]
    causal = torch.full((length, length), -1e9, dtype=query.dtype).triu_(1).repeat(heads // groups, 1)
    folded = query.reshape(n * groups, heads // groups * length, size)
    key, value = key.reshape(n * groups, length, size), value.reshape(n * groups, length, -1)
    out: torch.Tensor = ShortAttention.apply(folded, key, value, causal, size**-0.5 if scale is None else scale)
    return out.view(n, heads, length, -1)


def spread(packed: torch.Tensor, slots: torch.Tensor, num_sequences: int, width: int) -> torch.Tensor:
    """[t, h, d] to [n, h, L, d], zeros where a sequence is shorter."""
    size = num_sequences * width
    padded = packed if packed.shape[0] == size else packed.new_zeros((size, *packed.shape[1:])).index_copy(0, slots, packed)
    return padded.view(num_sequences, width, *packed.shape[1:]).transpose(1, 2)


def collect(padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, h, L, d] to [t, h * d]."""
    flat = padded.transpose(1, 2).flatten(2).flatten(0, 1)
    return flat if flat.shape[0] == slots.shape[0] else F.embedding(slots, flat)  # its backward is faster than that of an index


class PackedAttention(MegatronModule):
    """Stands where a layer spec names its core attention."""

    def __init__(
        self,
        config: Any,
        *,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        self.cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *masks: Any, packed_seq_params: Any, **unused: Any
    ) -> torch.Tensor:
        """[t, h, d] of a packed row to [t, h * d]."""
        layout = packed_seq_params.cu_seqlens_q.packed_layout
        key, value = (self.whole_sequences(x, layout) for x in (key, value))
        of_runs = zip(layout.runs, query.split(layout.local_sizes), key.split(layout.sizes), value.split(layout.sizes), strict=True)
        return torch.cat([self.of_run(*of_run) for of_run in of_runs])

    def of_run(self, run: Run, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[t, h, d] of the sequences of a run to [t, h * d]."""
        q = spread(query, run.query_slots, run.num_sequences, run.local_width)
        k, v = (spread(x, run.key_slots, run.num_sequences, run.width) for x in (key, value))
        return collect(self.attend(q, k, v, run.causal_mask()), run.query_slots)

    def whole_sequences(self, part: torch.Tensor, layout: PackedLayout) -> torch.Tensor:
        """Keys or values of whole sequences from the parts that context-parallel ranks hold."""
        if layout.gathered_order is None:
            return part
        return gather_from_sequence_parallel_region(part, group=self.cp_group)[layout.gathered_order]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """[n, h, L, d]; keys and values may have fewer heads, each shared by a run of query heads."""
        dropout = self.dropout if self.training else 0.0
        if q.device.type == "cpu" and q.dtype == torch.float32 and mask is None and dropout == 0.0 and q.shape[2] <= LONGEST:
            return short_attention(q, k, v, self.scale)
        is_shared = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=mask is None, scale=self.scale, enable_gqa=is_shared)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> torch.Tensor:
    """(a, b) to (a cos - sign b sin, b cos + sign a sin) over the halves of the last dimension."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    cos, sin = cos[..., :half], sin[..., :half]  # megatron repeats the angles over both halves
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(a, cos, out=out[..., :half]).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=out[..., half:]).addcmul_(a, sin, value=sign)
    return out


class Rotate(torch.autograd.Function):
    """The rotary embedding; its transpose is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return rotate(grads[0], cos, sin, -1), None, None


def rotate_packed(x: torch.Tensor, cu_seqlens: Any, angles: torch.Tensor, **unused: Any) -> torch.Tensor:
    """In place of Transformer Engine's fused rotary embedding for packed rows; positions restart with each sequence. [t, h, d]."""
    size = angles.shape[-1]
    cos, sin = cu_seqlens.packed_layout.rotary(angles, x.dtype)
    if size == x.shape[-1]:
        return Rotate.apply(x, cos, sin)
    return torch.cat((Rotate.apply(x[..., :size], cos, sin), x[..., size:]), -1)

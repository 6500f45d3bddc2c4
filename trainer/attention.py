"""Core attention and rotary embedding for megatron-core specs without Transformer Engine; causal only.

Does what megatron's own DotProductAttention refuses: packed rows (thd) and context parallelism. A packed row is spread to a padded
batch, given to one scaled_dot_product_attention call, and gathered back: one call for 256 short sequences instead of 256.

t  tokens of a packed row on this rank    n  its sequences    L  the longest of them    h  heads on this rank    d  head size
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule

from trainer.packed_layout import PackedLayout, layout_of
from trainer.short_attention import LONGEST, short_attention


class Spread(torch.autograd.Function):
    """[t, h, d] to [n * L, h, d], zeros where a sequence is shorter."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, slots: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return packed.new_zeros((size, *packed.shape[1:])).index_copy_(0, slots, packed)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].index_select(0, ctx.saved_tensors[0]), None, None


class Collect(torch.autograd.Function):
    """The transpose of Spread: [n * L, h, d] to [t, h, d]."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        ctx.size = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0]
        return grad.new_zeros((ctx.size, *grad.shape[1:])).index_copy_(0, ctx.saved_tensors[0], grad), None


def spread(packed: torch.Tensor, slots: torch.Tensor, num_sequences: int, width: int) -> torch.Tensor:
    """[t, h, d] to [n, h, L, d]."""
    size = num_sequences * width
    padded = packed if packed.shape[0] == size else Spread.apply(packed, slots, size)
    return padded.view(num_sequences, width, *packed.shape[1:]).transpose(1, 2)


def collect(padded: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """[n, h, L, d] to [t, h, d]."""
    flat = padded.transpose(1, 2).flatten(0, 1)
    return flat if flat.shape[0] == slots.shape[0] else Collect.apply(flat, slots)


class PackedAttention(MegatronModule):
    """Stands where a layer spec names its core attention."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
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
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """[t, h, d] to [t, h * d] for a packed row; [s, b, h, d] to [s, b, h * d] for a plain batch."""
        if query.dim() == 4:
            return self.plain(query, key, value)
        layout = layout_of(packed_seq_params.cu_seqlens_q, self.cp_group)
        key, value = (self.whole_sequences(x, layout) for x in (key, value))
        q = spread(query, layout.query_slots, layout.num_sequences, layout.local_width)
        k, v = (spread(x, layout.key_slots, layout.num_sequences, layout.width) for x in (key, value))
        return collect(self.attend(q, k, v, layout.mask), layout.query_slots).flatten(1)

    def plain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """A batch without packing; each row is causal from its start."""
        length, batch = query.shape[:2]
        layout = PackedLayout(
            [length * self.cp_group.size()], cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank(), device=query.device
        )
        key, value = (self.whole_sequences(x, layout) for x in (key, value))
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self.attend(q, k, v, layout.mask)
        return out.permute(2, 0, 1, 3).reshape(length, batch, -1)

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


def rotate_packed(x: torch.Tensor, cu_seqlens: torch.Tensor, angles: torch.Tensor, **unused: Any) -> torch.Tensor:
    """In place of Transformer Engine's fused rotary embedding for packed rows; positions restart with each sequence. [t, h, d]."""
    layout = layout_of(cu_seqlens, parallel_state.get_context_parallel_group())
    size = angles.shape[-1]
    cos, sin = layout.rotary(angles, x.dtype)
    if size == x.shape[-1]:
        return Rotate.apply(x, cos, sin)
    return torch.cat((Rotate.apply(x[..., :size], cos, sin), x[..., size:]), -1)

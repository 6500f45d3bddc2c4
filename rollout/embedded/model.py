"""The forward pass of a dense decoder (Qwen3, Qwen2, Llama) over rows of a KV cache.

Legend: B rows, P prompt tokens (padded right), T cached tokens, H query heads, K key-value heads, G = H / K, D head size,
C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rollout.embedded.kv_cache import KVCache
from rollout.embedded.model_config import ModelConfig
from rollout.embedded.model_weights import LayerWeights, ModelWeights
from rollout.embedded.rope import rotary_tables

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, shaped to broadcast over [..., heads, D]


class Model:
    """Runs the current `weights`; assigning another ModelWeights between two calls is a complete swap."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, max_tokens: int) -> None:
        """max_tokens: of a sequence, prompt and output."""
        self.config, self.weights, self.max_tokens = config, weights, max_tokens
        cos, sin = rotary_tables(config.rope, config.head_dim, max_tokens)
        dtype = weights.embedding.dtype
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        self._scale = config.head_dim**-0.5

    def decode(self, tokens_B: torch.Tensor, positions_B: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Write one token a row (rows 0..B-1) at its position into the cache; float32 logits [B, V] of the next."""
        num_tokens = int(positions_B.max()) + 1
        hidden_BC = self.weights.embedding[tokens_B]
        rotation = self._cos[positions_B].unsqueeze(1), self._sin[positions_B].unsqueeze(1)
        slots = self._cache_slots(positions_B, cache)
        mask = self._decode_mask(positions_B, num_tokens, hidden_BC.dtype)
        for layer, weights in enumerate(self.weights.layers):
            query, key, value = self._project(hidden_BC, weights, rotation)
            attended = self._attend_cached((query, key, value), cache.storage[layer], slots, mask)
            hidden_BC = self._finish_layer(hidden_BC, attended, weights)
        return self.logits(hidden_BC)

    def prefill(self, tokens_BP: torch.Tensor, cache: KVCache, rows: tuple[int, torch.Tensor]) -> torch.Tensor:
        """Fill the cache rows `first..first+len(source)-1` with the prompts `tokens_BP[source]`; hidden states [B, P, C].

        `rows` is (first, source): several rows may come from one prompt, which is computed once. Tokens are padded on
        the right; what the padding writes is masked in decode, then overwritten.
        """
        first, source = rows
        num_tokens = tokens_BP.shape[1]
        hidden = self.weights.embedding[tokens_BP]
        rotation = self._cos[:num_tokens, None], self._sin[:num_tokens, None]
        for layer, weights in enumerate(self.weights.layers):
            query, key, value = (part.transpose(1, 2) for part in self._project(hidden, weights, rotation))
            target = cache.storage[layer, :, first : first + len(source), :, :num_tokens]
            target[0], target[1] = key[source], value[source]
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            hidden = self._finish_layer(hidden, attended.transpose(1, 2).flatten(2), weights)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [..., V] of final hidden states [..., C]."""
        return F.linear(self._rms_norm(hidden, self.weights.norm), self.weights.head).float()

    def _project(self, hidden: torch.Tensor, weights: LayerWeights, rotation: Rotation) -> tuple[torch.Tensor, ...]:
        """Query [..., H, D], key and value [..., K, D], query and key normed and rotated."""
        config = self.config
        normed = self._rms_norm(hidden, weights.attention_norm)
        qkv = F.linear(normed, weights.qkv, weights.qkv_bias)
        qkv = qkv.view(*qkv.shape[:-1], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, value = qkv[..., :num_rotated, :], qkv[..., num_rotated:, :]
        if weights.qk_norm is not None:
            rotated = F.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps) * weights.qk_norm
        cos, sin = rotation
        rotated = torch.addcmul(rotated * cos, rotated.roll(config.head_dim // 2, -1), sin)
        return rotated[..., : config.num_heads, :], rotated[..., config.num_heads :, :], value

    def _cache_slots(self, positions_B: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Index [B * K] of each row's and head's current position in a layer's cache flattened to [N * K * T, D]."""
        num_heads = self.config.num_kv_heads
        heads = torch.arange(len(positions_B) * num_heads).view(-1, num_heads)
        return (heads * cache.num_tokens + positions_B[:, None]).flatten()

    def _decode_mask(self, positions_B: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B * K, 1, T]: 0 up to and at a row's position, -inf after."""
        hidden = torch.arange(num_tokens) > positions_B.repeat_interleave(self.config.num_kv_heads)[:, None]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf")).unsqueeze(1)

    def _attend_cached(
        self, qkv: tuple[torch.Tensor, ...], layer_cache: torch.Tensor, slots: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one query a row over its cached tokens; [B, H * D]."""
        query, key, value = qkv
        num_rows, num_tokens, head_dim = len(query), mask.shape[-1], self.config.head_dim
        for kind, new in enumerate((key, value)):
            layer_cache[kind].view(-1, head_dim).index_copy_(0, slots, new.reshape(-1, head_dim))
        keys, values = (layer_cache[kind, :num_rows, :, :num_tokens].flatten(0, 1) for kind in (0, 1))
        grouped = query.reshape(num_rows * self.config.num_kv_heads, -1, head_dim)
        scores = torch.baddbmm(mask, grouped, keys.transpose(1, 2), alpha=self._scale)
        return torch.bmm(scores.softmax(-1), values).view(num_rows, -1)

    def _finish_layer(self, hidden: torch.Tensor, attended: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        hidden = hidden + F.linear(attended, weights.output, weights.output_bias)
        gate, up = F.linear(self._rms_norm(hidden, weights.mlp_norm), weights.gate_up, weights.gate_up_bias).chunk(2, -1)
        return hidden + F.linear(F.silu(gate).mul_(up), weights.down, weights.down_bias)

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

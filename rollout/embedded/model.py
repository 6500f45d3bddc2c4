"""The forward pass of a dense decoder (Qwen3, Qwen2, Llama) over the pages of a KV cache.

Legend: B rows, P prompt tokens (padded right), G pages a row, T cached tokens, H query heads, K key-value heads, D head size,
C hidden size, V vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from rollout.embedded.kv_cache import KVCache, PageView
from rollout.embedded.model_config import EmbeddedModelConfig
from rollout.embedded.model_weights import LayerWeights, ModelWeights


def rotary_tables(rope: dict[str, Any], head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each float32 [T, D], such that `x * cos + roll(x, D/2) * sin` rotates x.

    The sign of "rotate half" is folded into sin, so that a roll replaces the negate and the concatenation.
    """
    inverse_frequency = _inverse_frequency(rope, head_dim)
    angle = torch.outer(torch.arange(num_positions).float(), inverse_frequency)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def _inverse_frequency(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    frequency = 1.0 / (float(rope["rope_theta"]) ** (torch.arange(0, head_dim, 2).float() / head_dim))
    if rope["rope_type"] == "linear":
        return frequency / float(rope["factor"])
    if rope["rope_type"] == "llama3":
        return _llama3(frequency, rope)
    return frequency


def _llama3(frequency: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1 scaling: long wavelengths stretched by `factor`, short kept, a smooth blend between."""
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    trained_length, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    wavelength = 2 * math.pi / frequency
    blend = ((trained_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequency / factor, frequency, blend)


Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin, shaped to broadcast over [..., heads, D]


class EmbeddedModel:
    """Runs the current `weights`; assigning another ModelWeights between two calls is a complete swap."""

    def __init__(self, config: EmbeddedModelConfig, weights: ModelWeights, max_tokens: int) -> None:
        """max_tokens: of a sequence, prompt and output."""
        self.config, self.weights, self.max_tokens = config, weights, max_tokens
        cos, sin = rotary_tables(config.rope, config.head_dim, max_tokens)
        dtype = weights.embedding.dtype
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)

    def decode(
        self, tokens_B: torch.Tensor, positions_B: torch.Tensor, pages_BG: torch.Tensor, cache: KVCache, placed: list[list[int]]
    ) -> torch.Tensor:
        """Write one token a row at its position into its pages; float32 logits [B, V] of the next. placed: the same pages, row by row."""
        hidden_BC = self.weights.embedding[tokens_B]
        rotation = self._cos[positions_B].unsqueeze(1), self._sin[positions_B].unsqueeze(1)
        view = PageView(cache, pages_BG, positions_B[:, None], placed=placed)
        mask = self._decode_mask(positions_B, view.num_tokens, hidden_BC.dtype)
        for layer, weights in enumerate(self.weights.layers):
            query, key, value = self._project(hidden_BC, weights, rotation)
            view.write(layer, key, value)
            keys, values = view.read(layer)
            query_BKQD = query.unflatten(1, (keys.shape[1], -1))  # the queries of one key-value head as if they were tokens of it
            attended = F.scaled_dot_product_attention(query_BKQD, keys, values, mask)
            hidden_BC = self._finish_layer(hidden_BC, attended.flatten(1), weights)
        return self.logits(hidden_BC)

    def prefill(
        self, tokens_BP: torch.Tensor, lengths_B: torch.Tensor, starts_B: torch.Tensor, pages_BG: torch.Tensor, cache: KVCache
    ) -> torch.Tensor:
        """Hidden states [B, P, C] of the first `lengths` tokens of each row, which go into its pages at `starts`, behind what they hold."""
        index_P = torch.arange(tokens_BP.shape[1])
        is_token = index_P < lengths_B[:, None]
        positions = starts_B[:, None] + torch.minimum(index_P, lengths_B[:, None] - 1)
        hidden = self.weights.embedding[tokens_BP]
        rotation = self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)
        view = PageView(cache, pages_BG, positions, is_token_BS=is_token)
        has_before = bool(starts_B.any())
        mask = (torch.arange(view.num_tokens) <= positions[..., None]).unsqueeze(1) if has_before else None
        for layer, weights in enumerate(self.weights.layers):
            query, key, value = self._project(hidden, weights, rotation)
            view.write(layer, key, value)
            keys, values = view.read(layer) if has_before else (key.transpose(1, 2), value.transpose(1, 2))
            attended = F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, mask, is_causal=not has_before, enable_gqa=True)
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
        num_rotated = config.num_attention_heads + config.num_key_value_heads
        rotated, value = qkv[..., :num_rotated, :], qkv[..., num_rotated:, :]
        if weights.qk_norm is not None:
            rotated = F.rms_norm(rotated, (config.head_dim,), None, config.rms_norm_eps) * weights.qk_norm
        cos, sin = rotation
        rotated = torch.addcmul(rotated * cos, rotated.roll(config.head_dim // 2, -1), sin)
        return rotated[..., : config.num_attention_heads, :], rotated[..., config.num_attention_heads :, :], value

    def _decode_mask(self, positions_B: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [B, 1, 1, T]: 0 up to and at a row's position, -inf after."""
        hidden = torch.arange(num_tokens) > positions_B[:, None]
        return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]

    def _finish_layer(self, hidden: torch.Tensor, attended: torch.Tensor, weights: LayerWeights) -> torch.Tensor:
        hidden = hidden + F.linear(attended, weights.output, weights.output_bias)
        gate, up = F.linear(self._rms_norm(hidden, weights.mlp_norm), weights.gate_up, weights.gate_up_bias).chunk(2, -1)
        return hidden + F.linear(F.silu(gate).mul_(up), weights.down, weights.down_bias)

    def _rms_norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (self.config.hidden_size,), weight, self.config.rms_norm_eps)

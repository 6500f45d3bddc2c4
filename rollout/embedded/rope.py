"""Rotary position embedding: the two tables that every layer shares. T positions, D head size."""

import math
from typing import Any

import torch


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

"""Keys and values of the running rows: one rectangle, sized to the rows and the longest sequence that run.

Legend: L layers, N rows, K key-value heads, T tokens, D head size.

    storage  [L, 2, N, K, T, D]      row r, position t holds the key (0) and value (1) of token t of the sequence in row r
"""

from __future__ import annotations

import torch

from rollout.embedded.model_config import ModelConfig

MIN_TOKENS = 64


class KVCache:
    """Grows on `reserve`, within `budget_bytes`; rows 0..n-1 are in use and stay together."""

    def __init__(self, config: ModelConfig, budget_bytes: int, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self.bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
        self.budget_tokens = budget_bytes // self.bytes_per_token
        self.num_rows, self.num_tokens = 0, 0
        self.storage = torch.empty(self._shape(0, 0), dtype=dtype)

    def _shape(self, num_rows: int, num_tokens: int) -> tuple[int, ...]:
        config = self._config
        return (config.num_layers, 2, num_rows, config.num_kv_heads, num_tokens, config.head_dim)

    def fits(self, num_rows: int, num_tokens: int) -> bool:
        """Whether `num_rows` rows of up to `num_tokens` tokens each stay within the budget."""
        return num_rows * num_tokens <= self.budget_tokens

    def reserve(self, num_rows: int, num_tokens: int, *, rows_in_use: int) -> None:
        """Make room for `num_rows` rows of `num_tokens` tokens, keeping the first `rows_in_use` rows."""
        if num_rows <= self.num_rows and num_tokens <= self.num_tokens:
            return
        grown = self._rounded(num_rows, num_tokens)
        # Zeros, not empty: a masked position must hold a finite value, for 0 * nan is nan.
        storage = torch.zeros(self._shape(*grown), dtype=self._dtype)
        kept = min(self.num_tokens, grown[1])
        if rows_in_use:
            storage[:, :, :rows_in_use, :, :kept] = self.storage[:, :, :rows_in_use, :, :kept]
        self.storage = storage
        self.num_rows, self.num_tokens = grown

    def _rounded(self, num_rows: int, num_tokens: int) -> tuple[int, int]:
        """Powers of two, so that growth is rare; the exact need where the budget is tight."""
        rows = max(1 << (num_rows - 1).bit_length(), self.num_rows)
        tokens = max(1 << (num_tokens - 1).bit_length(), self.num_tokens, MIN_TOKENS)
        return (rows, tokens) if self.fits(rows, tokens) else (num_rows, num_tokens)

    def move_rows(self, source: torch.Tensor, target: torch.Tensor, num_tokens: int) -> None:
        """Copy the first `num_tokens` of each row in `source` over the row in `target` (both int64 [n])."""
        used = self.storage[:, :, :, :, :num_tokens]
        used[:, :, target] = used[:, :, source]

"""Keys and values in pages; sequences that begin alike share the pages of what they have in common.

Legend: L layers, G pages, K key-value heads, P tokens a page, D head size; B rows, S new tokens of a row, n pages of a row, T = n * P.

    storage  [L, 2, G * K, P * D]     page g, head k: the keys (0) and values (1) of P consecutive tokens. Page 0 stands for no page

A page belongs to the sequences that run on it, to the tree of known prefixes, or to both; else it is free. Only the sequence that took
a page writes into it, behind what the tree knows of it. What runs has a copy besides, row by row without gaps, as long as that is small:

    window   [L, 2, N * K, T, D]      row r, head k of the batch: a decode step reads it as it is, and has nothing to gather
"""

import math

import numpy as np
import torch

from rollout.embedded.model_config import ModelConfig
from rollout.embedded.prefix_tree import PAGE_TOKENS, PrefixTree
from rollout.embedded.sequence import Sequence

WINDOW_BYTES = 64 << 20
LEAST_WINDOW = (4, 64)  # rows, tokens


class KVCache:
    """Pages within `budget_bytes`; memory is used from the first time that a page is."""

    def __init__(self, config: ModelConfig, budget_bytes: int, dtype: torch.dtype) -> None:
        self.num_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.bytes_per_token = 2 * config.num_hidden_layers * self.num_heads * self.head_dim * dtype.itemsize
        self.num_pages = budget_bytes // (self.bytes_per_token * PAGE_TOKENS)
        self.budget_tokens = self.num_pages * PAGE_TOKENS
        shape = (config.num_hidden_layers, 2, (self.num_pages + 1) * self.num_heads, PAGE_TOKENS * self.head_dim)
        # Zeros, for a masked position must hold a finite value (0 * nan is nan); numpy's take no memory before they are written.
        self.storage = torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
        self.scratch = torch.empty(0, PAGE_TOKENS * self.head_dim, dtype=dtype)
        self.window = Window(self)
        self.tree = PrefixTree()
        self._has_nan = False  # weights that made no numbers were served since the last flush
        self._flushes = 0
        self._free = list(range(self.num_pages, 0, -1))
        self._num_users = [0] * (self.num_pages + 1)
        self._num_pinned = 0
        self._copies: list[tuple[int, int]] = []

    def place(self, sequence: Sequence, most_new: int) -> bool:
        """Give it pages for all tokens that it may come to hold; what is known of its tokens is in them.

        False when there is no room now, or when more than `most_new` of its tokens are unknown.
        """
        tokens = sequence.tokens
        most = len(tokens) - 1  # the last one's logits are wanted
        if sequence.is_scored:
            most = min(most, sequence.logprob_start or 0)
        known, num_known = self.tree.match(sequence.cache_key, tokens[:most])
        shared, begun = (known[:-1], known[-1:]) if num_known % PAGE_TOKENS else (known, [])
        if len(tokens) - num_known > most_new:
            return False
        self._pin(shared)
        count = -(-sequence.max_tokens // PAGE_TOKENS) - len(shared)
        if count > self.num_pages - self._num_pinned:
            self._unpin(shared)
            return False
        while len(self._free) < count:
            self._reclaim([self.tree.evict()])
        own = [self._free.pop() for _ in range(count)]
        self._pin(own)
        self._copies += zip(begun, own, strict=False)
        sequence.pages, sequence.num_known, sequence.placed_after = shared + own, num_known, self._flushes
        return True

    def copy_begun(self) -> None:
        """Copy the pages of which new sequences know the first tokens, before anything is written."""
        if self._copies:
            source, target = self.rows(torch.tensor(self._copies).T).flatten(1)
            self.storage[:, :, target] = self.storage[:, :, source]
            self._copies = []

    def remember(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others share the first `num_tokens` tokens of it, unless they were computed before a flush."""
        if sequence.placed_after == self._flushes:
            self._reclaim(self.tree.insert(sequence.cache_key, sequence.tokens[:num_tokens], sequence.pages))

    def release(self, sequence: Sequence) -> None:
        """Take its pages back; what they hold is remembered, if it is numbers."""
        is_broken = any(map(math.isnan, [*sequence.input_logprobs[-1:], *sequence.output_logprobs[-1:]]))
        if not is_broken:
            self.remember(sequence, len(sequence.tokens) - 1)
        num_free = len(self._free)
        self._unpin(sequence.pages)
        sequence.pages = []
        if is_broken:
            self._has_nan = True
            self._clean(self._free[num_free:])

    def flush(self) -> None:
        """Forget every prefix. Who runs keeps its pages, and none of theirs is remembered later."""
        known = list(self.tree.pages)
        self.tree.clear()
        self._reclaim(known)
        self._flushes += 1
        if self._has_nan:
            self._clean(self._free)
            self._has_nan = False

    def _clean(self, pages: list[int]) -> None:
        """A recycled page is read to its end, masked: whatever is behind its tokens must be finite."""
        self.storage[:, :, self.rows(torch.tensor(pages, dtype=torch.int64)).flatten()] = 0
        self.window = Window(self)

    def rows(self, pages: torch.Tensor) -> torch.Tensor:
        """[..., K] of pages [...]: their rows in one layer's keys."""
        return pages[..., None] * self.num_heads + torch.arange(self.num_heads)

    def _pin(self, pages: list[int]) -> None:
        for page in pages:
            self._num_pinned += not self._num_users[page]
            self._num_users[page] += 1

    def _unpin(self, pages: list[int]) -> None:
        for page in pages:
            self._num_users[page] -= 1
            self._num_pinned -= not self._num_users[page]
        self._reclaim(pages)

    def _reclaim(self, pages: list[int]) -> None:
        """Free those that nobody has any more."""
        self._free += [page for page in pages if not self._num_users[page] and page not in self.tree.pages]


class Window:
    """The copy of what the rows of the batch have in their pages."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._owners: list[list[int]] = []
        self._shape = (0, 0)
        self.storage = cache.storage.new_empty(0)

    def follow(self, placed: list[list[int]], pages_BG: torch.Tensor, num_tokens: int) -> bool:
        """Hold the first `num_tokens` tokens of rows with these pages (copied where they changed); False if that is too much."""
        if len(placed) * num_tokens * self._cache.bytes_per_token > WINDOW_BYTES:
            self._owners, self._shape = [], (0, 0)
            return False
        if any(need > room for need, room in zip((len(placed), num_tokens), self._shape, strict=True)):
            self._grow(len(placed), num_tokens)
        num_same = len(self._owners)
        changed = [row for row, pages in enumerate(placed) if row >= num_same or self._owners[row] is not pages]
        if changed:
            rows = torch.tensor(changed)
            pages = self._cache.rows(pages_BG[rows, : num_tokens // PAGE_TOKENS]).transpose(1, 2)
            found = self._cache.storage[:, :, pages].flatten(2, 3).unflatten(-1, (PAGE_TOKENS, -1)).flatten(-3, -2)
            self.storage[:, :, self._cache.rows(rows).flatten(), : found.shape[-2]] = found
            self._owners = placed
        return True

    def _grow(self, num_rows: int, num_tokens: int) -> None:
        needs = zip((num_rows, num_tokens), self._shape, LEAST_WINDOW, strict=True)
        rows, tokens = (max(1 << (need - 1).bit_length(), *others) for need, *others in needs)
        self._shape = (rows, tokens)
        cache, self._owners = self._cache, []
        self.storage = cache.storage.new_zeros(cache.storage.shape[0], 2, rows * cache.num_heads, tokens, cache.head_dim)


class PageView:
    """One forward pass's way to its rows' pages: new tokens are written, then all are read."""

    def __init__(
        self, cache: KVCache, pages_BG: torch.Tensor, positions_BS: torch.Tensor, *, is_token_BS: torch.Tensor | None = None,
        placed: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """positions_BS: of the new tokens; is_token_BS: False for padding, which is not written; placed: as in Model.decode."""
        self._cache, self._is_token, self._num_rows = cache, is_token_BS, len(pages_BG) * cache.num_heads
        page, offset = pages_BG.gather(1, positions_BS // PAGE_TOKENS), positions_BS % PAGE_TOKENS
        slots_BSK = cache.rows(page) * PAGE_TOKENS + offset[..., None]
        self._slots = (slots_BSK if is_token_BS is None else slots_BSK[is_token_BS]).flatten()
        num_pages = int(positions_BS.max()) // PAGE_TOKENS + 1
        self.num_tokens = num_pages * PAGE_TOKENS
        self._window: Window | None = None
        if placed is not None and cache.window.follow(placed, pages_BG, self.num_tokens):
            self._window = cache.window
            stride = cache.window.storage.shape[-2]
            self._window_slots = (cache.rows(torch.arange(len(placed))) * stride + positions_BS).flatten()
        else:
            rows = cache.rows(pages_BG[:, :num_pages]).transpose(1, 2).flatten()
            self._rows = torch.cat([rows, rows + cache.storage.shape[2]])

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' keys and values [B, S, K, D]."""
        head_dim = self._cache.head_dim
        for kind, new in enumerate((key, value)):
            tokens = (new if self._is_token is None else new[self._is_token]).reshape(-1, head_dim)
            self._cache.storage[layer, kind].view(-1, head_dim).index_copy_(0, self._slots, tokens)
            if self._window is not None:
                self._window.storage[layer, kind].view(-1, head_dim).index_copy_(0, self._window_slots, tokens)

    def read(self, layer: int) -> torch.Tensor:
        """Keys and values [2, B * K, T, D] of all tokens, until the next read."""
        if self._window is not None:
            return self._window.storage[layer, :, : self._num_rows, : self.num_tokens]
        cache = self._cache
        if len(cache.scratch) < len(self._rows):
            cache.scratch = cache.scratch.new_empty(2 * len(self._rows), cache.scratch.shape[1])
        found = cache.scratch[: len(self._rows)]
        torch.index_select(cache.storage[layer].flatten(0, 1), 0, self._rows, out=found)
        return found.view(2, -1, self.num_tokens, cache.head_dim)

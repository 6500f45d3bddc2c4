"""Keys and values in pages; sequences that begin alike share the pages of what they have in common.

Legend: L layers, G pages, P tokens a page, K key-value heads, D head size, E = 2 * K * D what a token has in a layer: its keys, then its
values; B rows, S new tokens of a row, n pages of a row, T = n * P.

    storage  [L, G, P, E]     page g: P consecutive tokens. Page 0 stands for no page

A page belongs to the sequences that run on it, to the tree of known prefixes, or to both; else it is free. Only the sequence that took
a page writes into it, behind what the tree knows of it. What runs has a copy besides, row by row without gaps, as long as that is small:

    window   [L, N, T, E]     row r of the batch: a decode step reads it as it is, and has nothing to gather

Without the window decoding is 10 to 32% slower for 16 to 256 rows of 16 to 1,500 tokens (one torch thread, the quick start's model).

The tree of known prefixes has a page of tokens a node:

    root --(t0 .. t15)--> page 7 --(t16 .. t31)--> page 9
                                 --(t16 .. t20)--> page 4          a last page may hold fewer tokens

No chunk of a node's children is a prefix of another, so the one that shares most with given tokens is beside them in sorted order.
"""

import math
from bisect import bisect_left
from collections import OrderedDict
from operator import eq
from typing import NamedTuple

import numpy as np
import torch

from rollout.embedded.model_config import EmbeddedModelConfig
from rollout.embedded.sequence import Sequence

PAGE_TOKENS = 16

Chunk = tuple[int, ...]


class Node:
    """A page of tokens that follows those of its parent; chunks and children are sorted alike."""

    __slots__ = ("children", "chunk", "chunks", "page", "parent")

    def __init__(self, chunk: Chunk = (), page: int = 0, parent: "Node | None" = None) -> None:
        self.chunk, self.page, self.parent = chunk, page, parent
        self.chunks: list[Chunk] = []
        self.children: list[Node] = []

    def nearest(self, chunk: Chunk) -> "tuple[Node | None, int]":
        """The child that begins with the most tokens of `chunk`, and how many; None without any."""
        at = bisect_left(self.chunks, chunk)
        near = [(_shared(self.chunks[index], chunk), index) for index in (at, at - 1) if 0 <= index < len(self.chunks)]
        shared, index = max(near, default=(0, 0))
        return (self.children[index], shared) if shared else (None, 0)


def _shared(one: Chunk, other: Chunk) -> int:
    """How many tokens both begin with."""
    return [*map(eq, one, other), False].index(False)


class PrefixTree:
    """The prefixes by cache key; `pages` are those of all nodes. It knows who was used last, not who uses what now."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._roots: dict[str, Node] = {}
        # A node is used with all above it, and those after it: the first is always one without children.
        self._by_use: OrderedDict[Node, None] = OrderedDict()
        self.pages: set[int] = set()

    def match(self, key: str, tokens: list[int]) -> tuple[list[int], int]:
        """The pages of the longest known prefix of `tokens`, and its length; of the last page perhaps only the first tokens."""
        node, path, num_known = self._roots.setdefault(key, Node()), list[Node](), 0
        while num_known == len(path) * PAGE_TOKENS and num_known < len(tokens):
            child, shared = node.nearest(tuple(tokens[num_known : num_known + PAGE_TOKENS]))
            if child is None:
                break
            path.append(child)
            node, num_known = child, num_known + shared
        self._use(path)
        return [child.page for child in path], num_known

    def insert(self, key: str, tokens: list[int], pages: list[int]) -> list[int]:
        """Know these tokens, `pages` holding them in order, where nothing else holds them yet; the pages that this made superfluous."""
        node, path, dropped = self._roots.setdefault(key, Node()), list[Node](), list[int]()
        for start, page in zip(range(0, len(tokens), PAGE_TOKENS), pages, strict=False):
            chunk = tuple(tokens[start : start + PAGE_TOKENS])
            child, shared = node.nearest(chunk)
            if child is not None and shared == len(child.chunk) < len(chunk):
                dropped.append(self._detach(child))
                child = None
            if child is None or shared < len(chunk):
                child = self._attach(node, chunk, page)
            path.append(child)
            node = child
        self._use(path)
        return dropped

    def evict(self) -> int:
        """Forget the node that was used longest ago; its page. There must be one."""
        return self._detach(next(iter(self._by_use)))

    def _attach(self, parent: Node, chunk: Chunk, page: int) -> Node:
        node, at = Node(chunk, page, parent), bisect_left(parent.chunks, chunk)
        parent.chunks.insert(at, chunk)
        parent.children.insert(at, node)
        self.pages.add(page)
        return node

    def _detach(self, node: Node) -> int:
        parent = node.parent
        assert parent is not None  # a root is never used
        at = bisect_left(parent.chunks, node.chunk)
        del parent.chunks[at], parent.children[at], self._by_use[node]
        self.pages.discard(node.page)
        return node.page

    def _use(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._by_use[node] = None
            self._by_use.move_to_end(node)


WINDOW_BYTES = 64 << 20
LEAST_WINDOW = (4, 64)  # rows, tokens


class Prefix(NamedTuple):
    """The known first tokens of a sequence: full pages, which it shares, and perhaps a begun one, which is copied."""

    num_tokens: int
    shared: list[int]
    begun: list[int]


class KVCache:
    """Pages within `budget_bytes`; memory is used from the first time that a page is."""

    def __init__(self, config: EmbeddedModelConfig, budget_bytes: int, dtype: torch.dtype) -> None:
        self.num_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        self.bytes_per_token = 2 * config.num_hidden_layers * self.num_heads * self.head_dim * dtype.itemsize
        self.num_pages = budget_bytes // (self.bytes_per_token * PAGE_TOKENS)
        self.budget_tokens = self.num_pages * PAGE_TOKENS
        shape = (config.num_hidden_layers, self.num_pages + 1, PAGE_TOKENS, 2 * self.num_heads * self.head_dim)
        # Zeros, for a masked position must hold a finite value (0 * nan is nan); numpy's take no memory before they are written.
        self.storage = torch.from_numpy(np.zeros(int(np.prod(shape)) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
        self.scratch = self.storage.new_empty(0, *shape[2:])
        self.window = Window(self)
        self.tree = PrefixTree()
        self._has_nan = False  # weights that made no numbers were served since the last flush
        self._flushes = 0
        self._free = list(range(self.num_pages, 0, -1))
        self._num_users = [0] * (self.num_pages + 1)
        self._num_pinned = 0
        self._copies: list[tuple[int, int]] = []

    def match(self, sequence: Sequence) -> Prefix:
        """What is known of its tokens: at most all but the last (its logits are wanted), and none with a wanted logprob."""
        tokens = sequence.tokens
        most = len(tokens) - 1
        if sequence.is_scored:
            most = min(most, sequence.logprob_start or 0)
        pages, num_tokens = self.tree.match(sequence.cache_key, tokens[:most])
        num_full = num_tokens // PAGE_TOKENS
        return Prefix(num_tokens, pages[:num_full], pages[num_full:])

    def can_allocate(self, sequence: Sequence, prefix: Prefix) -> bool:
        """Whether there is room for all tokens that it may come to hold, known ones shared."""
        num_pinned = self._num_pinned + sum(not self._num_users[page] for page in prefix.shared)
        return _num_pages(sequence) - len(prefix.shared) <= self.num_pages - num_pinned

    def allocate(self, sequence: Sequence, prefix: Prefix) -> None:
        """Give it pages for all of them; what is known is in them after `copy_begun`."""
        self._pin(prefix.shared)
        count = _num_pages(sequence) - len(prefix.shared)
        while len(self._free) < count:
            self._reclaim([self.tree.evict()])
        own = [self._free.pop() for _ in range(count)]
        self._pin(own)
        self._copies += zip(prefix.begun, own, strict=False)
        sequence.pages, sequence.num_known, sequence.placed_after = prefix.shared + own, prefix.num_tokens, self._flushes

    def copy_begun(self) -> None:
        """Copy the pages that new sequences know the first tokens of, before anything is written."""
        if self._copies:
            source, target = torch.tensor(self._copies).T
            self.storage.index_copy_(1, target, self.storage.index_select(1, source))
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
        """A recycled page is read to its end, masked: what is behind its tokens must be finite."""
        self.storage[:, pages] = 0
        self.window = Window(self)

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


def _num_pages(sequence: Sequence) -> int:
    return -(-sequence.max_tokens // PAGE_TOKENS)


class Window:
    """The copy of what the rows of the batch have in their pages."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._owners: list[list[int]] = []
        self.storage = cache.storage.new_zeros(cache.storage.shape[0], 0, 0, cache.storage.shape[3])

    def follow(self, placed: list[list[int]], positions_B: torch.Tensor, num_tokens: int) -> bool:
        """Hold the tokens up to these positions of rows with these pages (copied where they changed), each row in `num_tokens`.

        False if that is too much.
        """
        if len(placed) * num_tokens * self._cache.bytes_per_token > WINDOW_BYTES:
            self._owners, self.storage = [], self.storage[:, :0, :0]
            return False
        if len(placed) > self.storage.shape[1] or num_tokens > self.storage.shape[2]:
            self._grow(len(placed), num_tokens)
        num_same = len(self._owners)
        changed = [row for row, pages in enumerate(placed) if row >= num_same or self._owners[row] is not pages]
        if changed:
            width, ends = self.storage.shape[2] // PAGE_TOKENS, (positions_B[changed] // PAGE_TOKENS + 1).tolist()
            pages = [page for row, end in zip(changed, ends, strict=True) for page in placed[row][:end]]
            targets = [row * width + index for row, end in zip(changed, ends, strict=True) for index in range(end)]
            found = self._cache.storage.index_select(1, torch.tensor(pages))
            self.storage.view(len(found), -1, *found.shape[2:]).index_copy_(1, torch.tensor(targets), found)
            self._owners = placed
        return True

    def _grow(self, num_rows: int, num_tokens: int) -> None:
        layers, *now, size = self.storage.shape
        needs = zip((num_rows, num_tokens), now, LEAST_WINDOW, strict=True)
        rows, tokens = (max(1 << (need - 1).bit_length(), *others) for need, *others in needs)
        self._owners, self.storage = [], self.storage.new_zeros(layers, rows, tokens, size)


class PageView:
    """One forward pass's way to its rows' pages: new tokens are written, then all are read."""

    def __init__(
        self, cache: KVCache, pages_BG: torch.Tensor, positions_BS: torch.Tensor, *, is_token_BS: torch.Tensor | None = None,
        placed: list[list[int]] | None = None,
    ) -> None:  # fmt: skip
        """positions_BS: of the new tokens; is_token_BS: False for padding, which is not written; placed: as in Model.decode."""
        self._cache, self._is_token, self._num_rows = cache, is_token_BS, len(pages_BG)
        slots_BS = pages_BG.gather(1, positions_BS // PAGE_TOKENS) * PAGE_TOKENS + positions_BS % PAGE_TOKENS
        self._slots = slots_BS.flatten() if is_token_BS is None else slots_BS[is_token_BS]
        num_pages = int(positions_BS.max()) // PAGE_TOKENS + 1
        self.num_tokens = num_pages * PAGE_TOKENS
        self._window: Window | None = None
        if placed is not None and cache.window.follow(placed, positions_BS[:, 0], self.num_tokens):
            self._window = cache.window
            self._window_slots = torch.arange(len(placed)) * cache.window.storage.shape[2] + positions_BS[:, 0]
        else:
            self._pages = pages_BG[:, :num_pages].flatten()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store the new tokens' keys and values [B, S, K, D], without padding [B, K, D]."""
        new = torch.cat([key, value], -2)
        new = (new if self._is_token is None else new[self._is_token]).flatten(1)
        self._cache.storage[layer].view(-1, new.shape[1]).index_copy_(0, self._slots, new)
        if self._window is not None:
            self._window.storage[layer].view(-1, new.shape[1]).index_copy_(0, self._window_slots, new)

    def read(self, layer: int) -> torch.Tensor:
        """Keys and values [2, B, K, T, D] of all tokens, until the next read."""
        cache = self._cache
        if self._window is not None:
            found = self._window.storage[layer, : self._num_rows, : self.num_tokens]
        else:
            if len(cache.scratch) < len(self._pages):
                cache.scratch = cache.scratch.new_empty(2 * len(self._pages), *cache.scratch.shape[1:])
            found = cache.scratch[: len(self._pages)]
            torch.index_select(cache.storage[layer], 0, self._pages, out=found)
        return found.view(self._num_rows, self.num_tokens, 2, cache.num_heads, cache.head_dim).permute(2, 0, 3, 1, 4)

"""Which page holds the keys and values of which tokens: a tree of the prefixes that were computed, a page of tokens a node.

    root --(t0 .. t15)--> page 7 --(t16 .. t31)--> page 9
                                 --(t16 .. t20)--> page 4          a last page may hold fewer tokens

No chunk of a node's children is a prefix of another, so the one that shares most with given tokens is beside them in sorted order.
"""

from bisect import bisect_left
from collections import OrderedDict
from operator import eq

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

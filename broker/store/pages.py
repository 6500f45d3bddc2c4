"""The pages of data.mdb, checked without trusting them: LMDB itself follows damaged pointers and takes the process with it.

Every tree is walked from the newest meta page. Only branch and leaf pages are read, so a store of many large payloads is
checked in a moment and none of them is loaded. Layout of LMDB 0.9 with 8-byte page numbers, little-endian:

    page    pgno u64 | pad u16 | flags u16 | lower u16 | upper u16 | offsets u16 * (lower - 16) / 2 | ... nodes, from upper
    meta    page header | magic u32 | version u32 | address u64 | map u64 | free tree 48 | main tree 48 | last page u64 | txn u64
    tree    pad u32 | flags u16 | depth u16 | branch u64 | leaf u64 | overflow u64 | entries u64 | root u64
    node    lo u16 | hi u16 | flags u16 | key size u16 | key | value, or the number of its first overflow page u64
"""

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slimebus.errors import UsageError

MAGIC, DATA_VERSION = 0xBEEFC0DE, 1
BRANCH, LEAF, OVERFLOW, META = 0x01, 0x02, 0x04, 0x08
BIG, SUBTREE = 0x01, 0x02
HEADER, NODE, TREE = 16, 8, 48
NO_PAGE = (1 << 64) - 1
MAX_DEPTH = 32
FREE_PAGES = "free pages"
WAY_OUT = (
    "restore a backup into a new run directory (`slimebus buffer restore`), or start over in a new one; "
    "`slimebus buffer verify` lists what is damaged, `slimebus buffer export` saves what is whole"
)


class Tree(NamedTuple):
    """One tree as its record describes it."""

    name: str
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class BadPage(Exception):
    """What is wrong with a page."""


def check_pages(path: Path) -> None:
    """Raise UsageError when data.mdb under `path` is torn or damaged; one that is absent or empty is fine."""
    file = path / "data.mdb"
    if not file.exists() or not file.stat().st_size:
        return
    try:
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as view:
            view.madvise(mmap.MADV_RANDOM)  # or each page would bring 30 neighbours along that are not looked at
            Checker(view).check()
    except BadPage as bad:
        raise damaged_store(f"at {path}", bad) from None
    except OSError as bad:
        raise UsageError(f"the broker's store at {path} cannot be read: {bad}; {WAY_OUT}", code="store") from None


def damaged_store(which: str, why: object) -> UsageError:
    """The error for a store that must not be used, with the way out."""
    return UsageError(f"the broker's store {which} is damaged: {why}; {WAY_OUT}", code="store_damaged")


class Checker:
    """Walks the trees of one data.mdb. Raises BadPage."""

    def __init__(self, view: mmap.mmap) -> None:
        self.view = view
        self.page_bytes = self.last_page = self.num_pages = 0
        self._counts = [0, 0, 0, 0]
        self._used = np.zeros(0, np.bool_)
        self._free: list[np.ndarray] = []

    def check(self) -> None:
        """Every tree of the newest meta page, and that no free page is used."""
        free, main = self._newest_meta()
        self._used = np.zeros(self.last_page + 1, np.bool_)
        self._used[:2] = True
        for tree in self._walk_tree(main):
            for inner in self._walk_tree(tree):
                raise BadPage(f"table {tree.name} has a tree inside, {inner.name}")
        self._walk_tree(free)
        for listed in self._free:
            if len(listed) and not (listed.min() >= 2 and listed.max() <= self.last_page):
                raise BadPage(f"the list of free pages names pages up to {listed.max()}, of {self.last_page + 1}")
            if self._used[listed].any():
                raise BadPage(f"page {listed[self._used[listed]][0]} is used and listed as free")
            self._used[listed] = True

    # --- meta ---

    def _newest_meta(self) -> tuple[Tree, Tree]:
        size = len(self.view)
        if size < 2 * 4096:
            raise BadPage(f"data.mdb has {size} bytes, less than its two first pages")
        self.page_bytes = struct.unpack_from("<I", self.view, 40)[0]
        if self.page_bytes not in (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
            raise BadPage(f"meta page 0 says pages of {self.page_bytes} bytes")
        metas = [self._meta(number) for number in (0, 1)]
        if abs(metas[0][0] - metas[1][0]) > 1 or (max(metas[0][0], metas[1][0]) and metas[0][0] == metas[1][0]):
            raise BadPage(f"its meta pages are of transactions {metas[0][0]} and {metas[1][0]}, which never follow each other")
        _, self.last_page, free, main = max(metas, key=lambda m: m[0])
        self.num_pages = size // self.page_bytes  # may be less than last_page + 1: free pages at the end were never written
        return free, main

    def _meta(self, number: int) -> tuple[int, int, Tree, Tree]:
        start = number * self.page_bytes
        page, _, flags = struct.unpack_from("<QHH", self.view, start)
        magic, version = struct.unpack_from("<II", self.view, start + HEADER)
        if (page, magic, version) != (number, MAGIC, DATA_VERSION) or not flags & META:
            raise BadPage(f"meta page {number} is not one (magic {magic:#x}, version {version})")
        last, txn = struct.unpack_from("<QQ", self.view, start + HEADER + 24 + 2 * TREE)
        if txn and txn % 2 != number:
            raise BadPage(f"meta page {number} is of transaction {txn}, which belongs on the other")
        trees = [_tree(self.view, start + HEADER + 24 + i * TREE, name) for i, name in enumerate((FREE_PAGES, "tables"))]
        return txn, last, trees[0], trees[1]

    # --- trees ---

    def _walk_tree(self, tree: Tree) -> list[Tree]:
        self._counts = [0, 0, 0, 0]
        found: list[Tree] = []
        if tree.root != NO_PAGE:
            self._walk(tree.root, tree.name, 1, tree.depth, found)
        expected = [tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries]
        if self._counts != expected:
            raise BadPage(f"{tree.name}: {self._counts} branch, leaf, overflow pages and entries, its record says {expected}")
        return found

    def _walk(self, number: int, name: str, depth: int, deepest: int, found: list[Tree]) -> None:
        self._take(number, 1, name)
        start = number * self.page_bytes
        own, _, flags, lower, upper = struct.unpack_from("<QHHHH", self.view, start)
        wanted = LEAF if depth == deepest else BRANCH
        if own != number or flags & (BRANCH | LEAF | OVERFLOW | META) != wanted or depth > MAX_DEPTH:
            raise BadPage(f"{name}: page {number} is not the {'leaf' if wanted == LEAF else 'branch'} that it should be")
        if not HEADER <= lower <= upper <= self.page_bytes or lower % 2:
            raise BadPage(f"{name}: page {number} has bounds {lower} and {upper} of {self.page_bytes}")
        nodes = self._nodes(number, name, lower, upper, is_leaf=wanted == LEAF)
        self._counts[1 if wanted == LEAF else 0] += 1
        if wanted == BRANCH:
            self._read_ahead(nodes)
            for child in nodes:
                self._walk(child, name, depth + 1, deepest, found)
        else:
            self._counts[3] += len(nodes)
            self._leaf(start, name, nodes, found)

    def _read_ahead(self, numbers: list[int]) -> None:
        """Have the system read these pages side by side: one after the other they take seconds in a store that is not in its cache."""
        for number in numbers:
            if 0 < number < self.num_pages:
                start = number * self.page_bytes
                start -= start % mmap.PAGESIZE
                self.view.madvise(mmap.MADV_WILLNEED, start, self.page_bytes)

    def _nodes(self, number: int, name: str, lower: int, upper: int, *, is_leaf: bool) -> list[int]:
        """Children of a branch, or offsets of a leaf's nodes; bounds, sizes and the order of keys are checked."""
        start = number * self.page_bytes
        page = self.view[start : start + self.page_bytes]
        offsets = struct.unpack_from(f"<{(lower - HEADER) // 2}H", page, HEADER)
        previous, found = b"", []
        for i, offset in enumerate(offsets):
            if not upper <= offset <= self.page_bytes - NODE:
                raise BadPage(f"{name}: page {number}, node {i} at {offset}, outside of the page")
            low, high, flags, key_bytes = struct.unpack_from("<HHHH", page, offset)
            inline = 0 if not is_leaf else 8 if flags & BIG else low | high << 16
            if offset + NODE + key_bytes + inline > self.page_bytes:
                raise BadPage(f"{name}: page {number}, node {i} runs over the end of the page")
            key = page[offset + NODE : offset + NODE + key_bytes]
            # the keys of the free-page tree are numbers; the first key of a branch stands for everything below
            if name != FREE_PAGES and i > (0 if is_leaf else 1) and key <= previous:
                raise BadPage(f"{name}: page {number}, the keys of nodes {i - 1} and {i} are out of order")
            previous = key
            found.append(offset if is_leaf else low | high << 16 | flags << 32)
        return found

    def _leaf(self, start: int, name: str, offsets: list[int], found: list[Tree]) -> None:
        for offset in offsets:
            low, high, flags, key_bytes = struct.unpack_from("<HHHH", self.view, start + offset)
            value = start + offset + NODE + key_bytes
            size = low | high << 16
            if flags & BIG:
                count = (HEADER - 1 + size) // self.page_bytes + 1
                first = struct.unpack_from("<Q", self.view, value)[0]
                self._take(first, count, name)
                self._counts[2] += count
                value = first * self.page_bytes + HEADER
            if name == FREE_PAGES:
                self._free.append(self._listed(value, size))
            elif flags & SUBTREE:
                key = self.view[start + offset + NODE : value].decode(errors="replace")
                found.append(_tree(self.view, value, f"table {key}"))

    def _listed(self, at: int, size_bytes: int) -> np.ndarray:
        """A list of free pages: its length, then their numbers."""
        numbers = np.frombuffer(self.view[at : at + size_bytes], "<u8")
        if not len(numbers) or len(numbers) <= numbers[0]:
            raise BadPage("a list of free pages is longer than its record")
        return numbers[1 : 1 + int(numbers[0])].astype(np.int64)

    def _take(self, number: int, count: int, name: str) -> None:
        if not 2 <= number <= number + count - 1 <= self.last_page:
            raise BadPage(f"{name}: points to page {number}, of {self.last_page + 1}")
        if number + count > self.num_pages:
            raise BadPage(f"{name}: page {number + count - 1} is missing, data.mdb ends after {self.num_pages} pages: it was cut short")
        if self._used[number : number + count].any():
            raise BadPage(f"{name}: page {number} is used twice")
        self._used[number : number + count] = True


def _tree(view: mmap.mmap, at: int, name: str) -> Tree:
    _, flags, depth, branch, leaf, overflow, entries, root = struct.unpack_from("<IHHQQQQQ", view, at)
    return Tree(name, flags, depth, branch, leaf, overflow, entries, root)

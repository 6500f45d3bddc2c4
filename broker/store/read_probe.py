"""A program that looks at a store and ends: LMDB follows damaged pointers, which may end this process and no other.

python read_probe.py FOLDER write|read TABLE...  exit code 0: the file has all pages in use, and each record of these tables is reachable;
                                                 1: stdout says what is not

Values are not read: a store of 10 GB is looked at in a fraction of a second. That their pages are there follows from the size of the file:

    | meta | meta | used ... free ... used |  free, never written  |
                                           `-- end of the file     `-- last page of the meta page

LMDB writes each page that it uses, so those behind the end of the file must all be in its list of free pages. It has no call for that
list; the layouts are those of mdb.c 0.9 (data version 1) on a 64-bit little-endian machine.
"""

import collections
import operator
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb

META = struct.Struct("<16x II QQ I36xQ 40xQ QQ")
"""page header; magic, version; address, map size; page size; roots of the free list and of the tables; last page, transaction"""
PAGE = struct.Struct("<QHHHH")
"""number, pad, flags, lower, upper; in an overflow page the last two are its number of pages. Offsets of the nodes follow, 2 bytes each."""
NODE = struct.Struct("<HHHH")
"""low and high half of the value's size, flags, size of the key; in a branch the first three are the number of a page"""
BRANCH, LEAF, OVERFLOW = 1, 2, 4
IN_OVERFLOW, IS_TABLE = 1, 2
"""Flags of a node: its value is the number of an overflow page; a table, with the root in the last 8 bytes."""
NO_PAGES = (struct.error, TypeError, ValueError, IndexError, RecursionError)
"""Raised where bytes are read as a page and are none."""
NO_PAGE = (1 << 64) - 1
TRIES = 100
"""A broker that writes meanwhile replaces a meta page within two commits."""


class Damage(Exception):
    """What is wrong, in words."""


class PageFile:
    """The pages of data.mdb, read and not mapped, as transaction `txn_id` left them; `is_found`: it was not overwritten meanwhile.

    Raises Damage or struct.error where they are not what LMDB writes.
    """

    def __init__(self, path: Path, page_bytes: int, txn_id: int) -> None:
        self._fd, self.page_bytes = os.open(path, os.O_RDONLY), page_bytes
        metas = [META.unpack(os.pread(self._fd, META.size, number * page_bytes)) for number in (0, 1)]
        self.is_found = any(meta[-1] == txn_id for meta in metas)
        self._free_root, self._table_root, self.last_page, _ = max(metas, key=lambda meta: meta[-1] == txn_id)[-4:]
        self.num_pages = os.fstat(self._fd).st_size // page_bytes

    def close(self) -> None:
        """Release the file."""
        os.close(self._fd)

    def check(self, *, is_written: bool) -> None:
        """Raise Damage unless each page that holds something is in the file, and those that lead to the values are pages of a tree.

        is_written: the list of free pages must be whole, too; who only reads a store does not need it.
        """
        for _, page, nodes in self._leaves(self._table_root):
            for at in nodes:
                if NODE.unpack_from(page, at)[2] & IS_TABLE:
                    [root] = struct.unpack("<Q", self._value(page, at)[-8:])
                    collections.deque(self._leaves(root), maxlen=0)
        num_missing = max(0, self.last_page + 1 - self.num_pages)
        try:
            num_missing -= sum(self.num_pages <= page for pages in self.free_lists() for page in pages)
        except (Damage, *NO_PAGES):
            if is_written:
                raise
        if num_missing:
            whole = (self.last_page + 1) * self.page_bytes
            what = f"it has {self.num_pages} of {self.last_page + 1} pages, {num_missing} of the others are in use"
            remedy = f"`truncate -s {whole} data.mdb` puts zeros in their place: where those were samples only, they are made again"
            raise Damage(f"data.mdb was cut short: {what}; {remedy}")

    def free_lists(self) -> Iterator[memoryview]:
        """Numbers of the pages that hold nothing, a list for each transaction that freed some."""
        for number, page, nodes in self._leaves(self._free_root):
            for at in nodes:
                listed = memoryview(self._value(page, at)).cast("Q")
                pages = listed[1 : 1 + listed[0]]
                is_ordered = all(map(operator.gt, pages, pages[1:])) and all(1 < n <= self.last_page for n in (*pages[:1], *pages[-1:]))
                if len(pages) != listed[0] or not is_ordered:
                    raise Damage(f"page {number}, or one that it leads to, is no list of free pages")
                yield pages

    def _leaves(self, number: int) -> Iterator[tuple[int, bytes, tuple[int, ...]]]:
        """(number, page, offsets of its nodes) of each leaf of the tree with page `number` as its root."""
        if number == NO_PAGE:
            return
        page = self._read(number, BRANCH | LEAF, self.page_bytes)
        _, _, flags, lower, upper = PAGE.unpack_from(page)
        if not PAGE.size < lower <= upper <= self.page_bytes:
            raise Damage(f"page {number} is damaged")
        nodes = struct.unpack_from(f"<{(lower - PAGE.size) // 2}H", page, PAGE.size)
        if flags & LEAF:
            yield number, page, nodes
            return
        for at in nodes:
            low, high, highest, _ = NODE.unpack_from(page, at)
            yield from self._leaves(low | high << 16 | highest << 32)

    def _value(self, page: bytes, at: int) -> bytes:
        low, high, flags, key_bytes = NODE.unpack_from(page, at)
        size, start = low | high << 16, at + NODE.size + key_bytes
        if not flags & IN_OVERFLOW:
            return page[start : start + size]
        [number] = struct.unpack_from("<Q", page, start)
        return self._read(number, OVERFLOW, PAGE.size + size)[PAGE.size :]

    def _read(self, number: int, flags: int, size: int) -> bytes:
        """So many bytes from the begin of a page that has one of these flags."""
        found = os.pread(self._fd, size, number * self.page_bytes) if number <= self.last_page else b""
        if len(found) < size:
            raise Damage(f"data.mdb was cut short: page {number} is in use and not in it")
        own_number, _, own_flags, _, _ = PAGE.unpack_from(found)
        if own_number != number or not own_flags & flags:
            raise Damage(f"page {number} is damaged")
        return found


def check_pages(env: lmdb.Environment, folder: str, *, is_written: bool) -> None:
    """Raise Damage unless the file has every page that is in use."""
    for _ in range(TRIES):
        with env.begin() as txn:  # while it is open, no page that it sees is written to
            file = PageFile(Path(folder, "data.mdb"), env.stat()["psize"], txn.id())
            try:
                if file.is_found:
                    return file.check(is_written=is_written)
            finally:
                file.close()


def check_tables(env: lmdb.Environment, tables: list[str]) -> None:
    """Raise Damage unless each record of these tables is reachable."""
    with env.begin(buffers=True) as txn:
        for table in tables:
            try:
                handle = env.open_db(table.encode(), txn=txn, create=False)
            except lmdb.NotFoundError:
                continue
            previous, found, is_ordered = b"", 0, True
            for key in map(bytes, txn.cursor(db=handle).iternext(values=False)):
                previous, found, is_ordered = key, found + 1, is_ordered and previous < key
            expected = txn.stat(handle)["entries"]
            if found != expected or not is_ordered:
                raise Damage(f"table {table}: {found} records found of {expected}, or not in order")


def problem_of(folder: str, use: str, tables: list[str]) -> str:
    """What is wrong with a store that is written or only read; empty when nothing is."""
    try:
        with lmdb.open(folder, readonly=True, create=False, readahead=False, max_dbs=64) as env:
            check_pages(env, folder, is_written=use == "write")
            check_tables(env, tables)
    except (Damage, lmdb.Error) as bad:
        return str(bad)
    except NO_PAGES as bad:
        return f"a page is damaged: {bad}"
    return ""


if __name__ == "__main__":
    problem = problem_of(sys.argv[1], sys.argv[2], sys.argv[3:])
    sys.stdout.write(problem)
    sys.exit(1 if problem else 0)

"""The rows of one file of JSON lines: each is checked once at the start, and read by its offset when its turn comes."""

import contextlib
import os
import weakref
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import xxhash

from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_files import COPY_BYTES, PARQUET, FileSpec, open_lines
from slimebus.prompts.prompt_record import BYTE_ORDER_MARK, MAX_RECORD_BYTES, LineReader, PromptKeys

OnBad = Callable[[DataError], None]
"""Told of each malformed row; raises it, or takes note and lets the row be skipped."""


class RowFile:
    """The rows of one file or of its slice. `spill_dir`: where the temporary file goes; the system's place when None.

    `digest` is of the bytes from the first row to the last. 12 bytes of memory a row. The file is closed with the last use of its rows.
    Raises DataError naming file, row and reason.
    """

    def __init__(self, spec: FileSpec, keys: PromptKeys, on_bad: OnBad, *, spill_dir: Path | None = None) -> None:
        self.path, self._reader = spec.path, LineReader(keys)
        self._file = open_lines(spec.path, keys, spill_dir)
        weakref.finalize(self, self._file.close)
        self._seen, self._refused = self._state(), (-1, -1)
        offsets, sizes = self._scan(on_bad)
        chosen = spec.rows_of(len(offsets))
        self._offsets, self._sizes = offsets[chosen.start : chosen.stop], sizes[chosen.start : chosen.stop]
        self.digest = self._hashed()

    def __len__(self) -> int:
        return len(self._offsets)

    def record(self, row: int) -> bytes:
        """The record of a row. Raises DataError when the file changed since it was checked."""
        self._check_unchanged()
        line = os.pread(self._file.fileno(), self._sizes[row], self._offsets[row])
        try:
            return self._reader.record(line)
        except DataError as bad:
            raise DataError(f"{self.path}: row {row} can be read no more: {bad.text}") from None

    # --- checking ---

    def _scan(self, on_bad: OnBad) -> tuple["array[int]", "array[int]"]:
        offsets, sizes = array("q"), array("i")
        mark = ": row " if self.path.suffix in PARQUET else ":"
        for number, begin, line in _lines(self._file):
            try:
                self._reader.check(line)
            except DataError as bad:
                if not line.isspace():
                    on_bad(DataError(f"{self.path}{mark}{number}: {bad.text}"))
                continue
            offsets.append(begin)
            sizes.append(len(line))
        return offsets, sizes

    def _hashed(self) -> str:
        digest, begin = xxhash.xxh3_64(), self._offsets[0] if self._offsets else 0
        end = self._offsets[-1] + self._sizes[-1] if self._offsets else 0
        while begin < end:
            piece = os.pread(self._file.fileno(), min(COPY_BYTES, end - begin), begin)
            if not piece:
                raise DataError(f"prompt data {self.path} became shorter while it was read; is something writing to it?")
            digest.update(piece)
            begin += len(piece)
        return digest.hexdigest()

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns

    def _check_unchanged(self) -> None:
        now = self._state()
        if now == self._seen:
            return
        with contextlib.suppress(DataError):
            if now != self._refused and self._hashed() == self.digest:
                self._seen = now
                return
        self._refused = now
        raise DataError(f"prompt data {self.path} changed while the run goes on; put back what it was, or start in a new run directory")


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """(number from 1, offset, line) of each line; of one that is too long only its beginning."""
    end, limit = 0, MAX_RECORD_BYTES + 1
    file.seek(0)
    if file.read(3) == BYTE_ORDER_MARK:
        end = 3
    file.seek(end)
    number = 0
    while line := file.readline(limit):
        number += 1
        begin, end = end, end + len(line)
        yield number, begin, line
        while len(line) >= limit and not line.endswith(b"\n") and (line := file.readline(limit)):
            end += len(line)

"""Prompts from jsonl files: checked before the run starts, read by offset, shuffled without a copy, resumed by position.

Position p is prompt `p % n` of epoch `p // n`, in an order that only the seed and the epoch decide. A prompt's id is
`epoch/row`, its record a msgpack map {prompt, label, metadata} that no one but the worker reads.
"""

import logging
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from broker.state.table import Prompt
from slimebus.errors import DataError

log = logging.getLogger("broker")

SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
MAX_RECORD_BYTES = 16 * 1024 * 1024


class JsonlRows:
    """The rows of some jsonl files, `path` or `path@[a:b]`, one after the other.

    Every line is parsed once here. Raises DataError naming file, line number and reason; with skip_bad such lines are logged,
    counted in `num_skipped` and left out.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        input_key: str = "prompt",
        label_key: str = "label",
        metadata_key: str = "metadata",
        skip_bad: bool = False,
    ) -> None:
        self.skip_bad, self.num_skipped = skip_bad, 0
        self.input_key, self.label_key, self.metadata_key = input_key, label_key, metadata_key
        self._files: list[int] = []
        offsets: list[np.ndarray] = []
        self._digest = xxhash.xxh3_64()
        for spec in paths:
            offsets.append(self._open(spec, len(self._files)))
        table = np.concatenate(offsets) if offsets else np.zeros((0, 3), np.int64)
        if not len(table):
            raise DataError(f"no prompts in {', '.join(paths) or 'an empty list of files'}; expected at least one line of JSON")
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do."""
        return f"{len(self)} prompts {self._digest.hexdigest()}"

    def record(self, row: int) -> bytes:
        """The record of one row: a msgpack map {prompt, label, metadata}."""
        file, start, stop = self._table[row].tolist()
        line = os.pread(self._files[file], stop - start, start)
        return self._record(msgspec.json.decode(line))

    def close(self) -> None:
        """Release the files."""
        for file in self._files:
            os.close(file)
        self._files = []

    def _record(self, fields: dict[str, Any]) -> bytes:
        return msgspec.msgpack.encode(
            {"prompt": fields[self.input_key], "label": fields.get(self.label_key), "metadata": fields.get(self.metadata_key) or {}}
        )

    def _open(self, spec: str, index: int) -> np.ndarray:
        path, start, stop = _parse_slice(spec)
        if not path.is_file():
            raise DataError(f"prompt data {path} does not exist (looked in {Path.cwd()}); check prompt_data")
        self._files.append(os.open(path, os.O_RDONLY))
        rows, end = [], 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                begin, end = end, end + len(line)
                if line.strip() and self._is_good(path, number, line):
                    rows.append((index, begin, end, number))
        chosen = rows[start:stop]
        for _, begin, end, _ in chosen:
            self._digest.update(os.pread(self._files[index], end - begin, begin))
        return np.array([row[:3] for row in chosen], np.int64).reshape(-1, 3)

    def _is_good(self, path: Path, number: int, line: bytes) -> bool:
        try:
            self._check(path, number, line)
        except DataError as bad:
            if not self.skip_bad:
                raise
            self.num_skipped += 1
            log.warning("skipped %s", bad.text)
            return False
        return True

    def _check(self, path: Path, number: int, line: bytes) -> None:
        if len(line) > MAX_RECORD_BYTES:
            raise DataError(f"{path}:{number}: a line of {len(line)} bytes; at most {MAX_RECORD_BYTES}")
        try:
            fields = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as bad:
            raise DataError(f"{path}:{number}: not JSON: {bad}") from None
        if not isinstance(fields, dict):
            raise DataError(f"{path}:{number}: expected a JSON object, got {type(fields).__name__}")
        if self.input_key not in fields:
            raise DataError(f"{path}:{number}: no {self.input_key!r} (input_key); it has {', '.join(map(repr, fields)) or 'nothing'}")
        if not _is_prompt(fields[self.input_key]):
            raise DataError(f"{path}:{number}: {self.input_key!r} must be text or a list of chat messages")
        if not isinstance(fields.get(self.metadata_key) or {}, dict):
            raise DataError(f"{path}:{number}: {self.metadata_key!r} must be an object")


def _is_prompt(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(message, dict) for message in value)
    return isinstance(value, str)


def _parse_slice(spec: str) -> tuple[Path, int | None, int | None]:
    found = SLICE.match(spec)
    if found is None:
        return Path(spec), None, None
    start, stop = (int(found[side]) if found[side] else None for side in ("start", "stop"))
    return Path(found["path"]), start, stop


class JsonlSource:
    """An ordered source of prompts over rows. `num_epochs`: None repeats for ever."""

    def __init__(self, rows: JsonlRows, *, shuffle: bool = True, seed: int = 0, num_epochs: int | None = None) -> None:
        self.rows, self.shuffle, self.seed, self.num_epochs = rows, shuffle, seed, num_epochs
        self.fingerprint = f"{rows.fingerprint}, {f'shuffled by seed {seed}' if shuffle else 'in order'}"
        self._order_epoch = -1
        self._order = np.zeros(0, np.int64)

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None past the last epoch."""
        epoch, place = divmod(position, len(self.rows))
        if self.num_epochs is not None and epoch >= self.num_epochs:
            return None
        row = int(self._epoch_order(epoch)[place]) if self.shuffle else place
        return Prompt(id=f"{epoch}/{row}", position=position, record=self.rows.record(row))

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id, or None for an id that this source never gives."""
        found = re.fullmatch(r"(\d{1,12})/(\d{1,12})", prompt_id)
        if found is None:
            return None
        epoch, row = int(found[1]), int(found[2])
        if row >= len(self.rows) or (self.num_epochs is not None and epoch >= self.num_epochs):
            return None
        place = int(np.flatnonzero(self._epoch_order(epoch) == row)[0]) if self.shuffle else row
        return Prompt(id=prompt_id, position=epoch * len(self.rows) + place, record=self.rows.record(row))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._order_epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
            self._order_epoch = epoch
        return self._order

"""The prompts of some files as one numbered list, checked before the run starts."""

import logging
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from broker.source.jsonl import RowFile
from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_files import FileSpec, parse
from slimebus.prompts.prompt_record import PromptKeys
from slimebus.prompts.verifiers_tasks import is_tasks

log = logging.getLogger("broker")

MAX_LISTED = 100
"""Skipped rows that are kept by name; all are counted and logged."""


class FileRows:
    """The rows of files one after the other. `specs`: PATH, PATH@[a:b], PATH*WEIGHT, PATH@[a:b]*WEIGHT; jsonl (.gz) or parquet.

    Raises DataError naming file, line and reason; with skip_bad such rows are logged, left out, counted in `num_skipped`, and the first
    100 listed in `skipped`. spill_dir: where copies of packed files are made that end with the process.
    """

    def __init__(
        self, specs: Sequence[str], *, keys: PromptKeys | None = None, skip_bad: bool = False, spill_dir: Path | None = None
    ) -> None:
        self.num_skipped, self.skipped = 0, list[str]()
        self._skips_bad, self._keys, self._spill_dir = skip_bad, keys or PromptKeys(), spill_dir
        parsed = [parse(spec) for spec in specs]
        self._files = [self._open(spec) for spec in parsed]
        self.sizes = [len(file) for file in self._files]
        self.weights: list[Fraction] | None = None
        if any(spec.weight is not None for spec in parsed):
            self.weights = [Fraction(1) if spec.weight is None else spec.weight for spec in parsed]
        self._starts = array("q", [0, *accumulate(self.sizes)])
        self._check_not_empty(specs)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do."""
        return f"{len(self)} prompts (" + ", ".join(f"{len(file)} rows {file.digest}" for file in self._files) + ")"

    def record(self, row: int) -> bytes:
        """The record of one row: a msgpack map {prompt, label, metadata}. Raises DataError when its file changed."""
        file = bisect_right(self._starts, row) - 1
        return self._files[file].record(row - self._starts[file])

    def _open(self, spec: FileSpec) -> RowFile:
        path = spec.path
        if not is_tasks(path, self._keys.environment) and not path.is_file():
            if not path.exists():
                raise DataError(f"prompt data {path} does not exist (looked in {Path.cwd()}); check prompt_data")
            what = "a directory; name the files in it" if path.is_dir() else "not a regular file"
            raise DataError(f"prompt data {path} is {what}")
        return RowFile(spec, self._keys, self._on_bad, spill_dir=self._spill_dir)

    def _on_bad(self, bad: DataError) -> None:
        if not self._skips_bad:
            raise bad
        self.num_skipped += 1
        if len(self.skipped) < MAX_LISTED:
            self.skipped.append(bad.text)
        log.warning("skipped %s", bad.text)

    def _check_not_empty(self, specs: Sequence[str]) -> None:
        empty = [spec for spec, size in zip(specs, self.sizes, strict=True) if not size]
        if len(self) and not (self.weights and empty):
            for spec in empty:
                log.warning("no prompts in %s", spec)
            return
        skipped = f" ({self.num_skipped} were skipped as malformed)" if self.num_skipped else ""
        raise DataError(f"no prompts in {', '.join(empty) or 'an empty list of files'}{skipped}; expected at least one line of JSON")

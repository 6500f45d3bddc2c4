"""One entry of `data.prompt_data`: PATH, PATH@[a:b], PATH*WEIGHT, PATH@[a:b]*WEIGHT."""

import re
from fractions import Fraction
from pathlib import Path

import msgspec

from slimebus.bus.errors import DataError

WEIGHT = re.compile(r"^(?P<path>.+)\*(?P<weight>\d+(?:\.\d*)?|\.\d+)$")
SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")


class FileSpec(msgspec.Struct, frozen=True):
    """A file, the rows of it that are used, and its weight: None when none was given."""

    path: Path
    start: int | None = None
    stop: int | None = None
    weight: Fraction | None = None

    def rows_of(self, num_rows: int) -> range:
        """The rows that the slice takes. Raises DataError when it takes none of some."""
        chosen = range(num_rows)[self.start : self.stop]
        if num_rows and not chosen:
            bounds = ":".join("" if side is None else str(side) for side in (self.start, self.stop))
            raise DataError(f"prompt data {self.path}: the slice @[{bounds}] takes none of its {num_rows} rows")
        return chosen


def parse(text: str) -> FileSpec:
    """Read an entry; a file that has exactly this name is meant as it stands. Raises DataError."""
    rest, weight = text, None
    if Path(text).is_file():
        return FileSpec(Path(text))
    if (found := WEIGHT.match(rest)) is not None:
        rest, weight = found["path"], Fraction(found["weight"])
        if not weight > 0:
            raise DataError(f"prompt_data {text}: the weight must be above 0")
    if Path(rest).is_file() or (found := SLICE.match(rest)) is None:
        if "@[" in rest and not Path(rest).exists():
            raise DataError(f"prompt_data {text}: expected PATH, PATH@[start:stop], PATH*WEIGHT or PATH@[start:stop]*WEIGHT")
        return FileSpec(Path(rest), weight=weight)
    start, stop = (int(found[side]) if found[side] else None for side in ("start", "stop"))
    return FileSpec(Path(found["path"]), start, stop, weight)

"""Groups as a folder of files that other tools can read: `slimebus buffer export` and the trainer's dumps write them.

step_00000041/             in place of the files, one folder of them for each step: of trained samples (trainer/watch/dumps.py)
groups.jsonl               one group a line: what became of it, its prompt, and the headers and fields of its samples
arrays-00000.safetensors   arrays named GROUP/SAMPLE/FIELD of the groups with this file in their line; bfloat16 as its 16 bits (uint16)
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from slimebus.bus.errors import DataError, ProtocolError, UsageError
from slimebus.bus.sample_table import CheckedGroup, SampleTable, check_group, encode_table
from slimebus.bus.samples import Sample, decode_arrays, decode_group, encode_group
from slimebus.weights.host.safetensors_file import write_file
from slimebus.weights.tensors import Tensor

GROUPS_FILE, BATCHES_FILE = "groups.jsonl", "batches.jsonl"
SAMPLES_FOLDER, STEP_FOLDER = "samples", re.compile("step_([0-9]+)")
MAX_LINE_BYTES = 1 << 30
Row = TypeVar("Row")


class ExportedGroup(msgspec.Struct):
    """A line of groups.jsonl."""

    group: str
    table: SampleTable | None = None
    arrays: str = ""

    @property
    def num_samples(self) -> int:
        """That it has here."""
        return len(self.table.num_tokens) if self.table else 0

    def samples(self, folder: Path) -> list[Sample]:
        """Its samples; `folder` has its file. Raises DataError."""
        assert self.table is not None  # it was exported with samples
        try:
            return decode_group([encode_table(self.table), *read_frames(folder / Path(self.arrays).name, self.group, self.table)])
        except ProtocolError as bad:
            raise DataError(f"{folder}: group {self.group!r}: {bad.text}") from None


def folders_of(folder: Path) -> list[Path]:
    """The folders that hold exported groups: this one, or those of its steps."""
    return [folder] if (folder / GROUPS_FILE).exists() else [*step_folders(folder).values()] or [folder]


def step_folders(folder: Path) -> dict[int, Path]:
    """Those of steps in a folder, by step; what else lies there is left out."""
    found = ((STEP_FOLDER.fullmatch(place.name), place) for place in folder.glob("step_*"))
    return dict(sorted((int(step[1]), place) for step, place in found if step))


def read_groups(folder: Path) -> Iterator[ExportedGroup]:
    """The groups of one folder that have samples. Raises UsageError or DataError."""
    return (row for row in read_lines(folder / GROUPS_FILE, ExportedGroup) if row.table is not None)


def read_lines(file: Path, form: type[Row]) -> Iterator[Row]:
    """The rows of a file of an export. Raises UsageError or DataError."""
    for _, row in numbered_rows(file, form):
        if isinstance(row, DataError):
            raise row
        yield row


def numbered_rows(file: Path, form: type[Row]) -> Iterator[tuple[int, Row | DataError]]:
    """(number of its line, row) of a file of an export; of a line that is no such row the error. Raises UsageError."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _row(line, form, f"{file}:{number}")
    except OSError as bad:
        what = "expected what `slimebus buffer export` or a dump wrote, or a jsonl file"
        raise UsageError(f"cannot read {file}: {bad.strerror}; {what}") from None


def _row(line: bytes, form: type[Row], place: str) -> Row | DataError:
    if len(line) > MAX_LINE_BYTES:
        return DataError(f"{place}: a line of {len(line)} bytes; at most {MAX_LINE_BYTES}")
    try:
        return msgspec.json.decode(line, type=form)
    except msgspec.ValidationError as bad:
        return DataError(f"{place}: neither a prompt nor a group as `slimebus buffer export` writes it, nor a batch of a dump: {bad}")
    except (msgspec.DecodeError, UnicodeDecodeError) as bad:
        return DataError(f"{place}: not JSON: {bad}")


def shard_name(number: int) -> str:
    """The file of the arrays of some groups."""
    return f"arrays-{number:05d}.safetensors"


def arrays_of(name: str, group: CheckedGroup) -> dict[str, np.ndarray]:
    """The arrays of a group by the names that they have in a file."""
    return {f"{name}/{i}/{field}": part for field, parts in decode_arrays(group).items() for i, part in enumerate(parts)}


def write_groups(folder: Path, groups: Iterable[tuple[str, Sequence[Sample]]], *, max_bytes: int = 0) -> None:
    """Write these groups, by id, into a folder that is there. Raises OSError, also for more than max_bytes (0: any) of arrays."""
    rows, arrays = list[dict[str, object]](), dict[str, np.ndarray]()
    for name, samples in groups:
        checked = check_group(encode_group(samples))
        arrays |= arrays_of(name, checked)
        rows.append({"group": name, "table": checked.table, "arrays": shard_name(0)})
    size = sum(array.nbytes for array in arrays.values())
    if size > max_bytes > 0:
        raise OSError(f"the groups have {size} bytes, at most {max_bytes} are written")
    write_arrays(arrays, folder / shard_name(0))
    (folder / GROUPS_FILE).write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def write_arrays(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a file of arrays. Raises OSError."""
    flat = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in arrays.items()}
    write_file(path, {name: Tensor(array.dtype.name, array.shape, flat[name]) for name, array in arrays.items()})


def read_frames(path: Path, name: str, table: SampleTable) -> list[bytes]:
    """One frame for each field of a group, from the arrays of its samples. Raises DataError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as arrays:
            names = [[f"{name}/{i}/{field.name}" for i in range(len(table.num_tokens))] for field in table.fields]
            return [b"".join(arrays.get_tensor(name).tobytes() for name in of_field) for of_field in names]
    except (SafetensorError, OSError) as bad:
        raise DataError(f"{path}: the arrays of group {name!r} cannot be read: {bad}") from None

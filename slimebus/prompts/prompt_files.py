"""Files of prompts: an entry of `data.prompt_data`, PATH, PATH@[a:b], PATH*WEIGHT or PATH@[a:b]*WEIGHT; and any format as lines of JSON.

jsonl is read as it is; .gz, parquet and the tasks of an environment are written anew, as no row in the middle of them can be looked up.
"""

import contextlib
import gzip
import re
import tempfile
import zlib
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import msgspec

from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_record import PromptKeys
from slimebus.prompts.verifiers_tasks import is_tasks, write_tasks

WEIGHT = re.compile(r"^(?P<path>.+)\*(?P<weight>\d+(?:\.\d*)?|\.\d+)$")
SLICE = re.compile(r"^(?P<path>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
COPY_BYTES = 4 * 1024 * 1024
PARQUET = (".parquet", ".pq")
PACKED = (".zst", ".bz2", ".xz", ".zip")
BATCH_ROWS = 64
"""Read at once: 64 prompts of the largest size are 1 GiB."""
READ_BUFFER_BYTES = 1024 * 1024
ALWAYS_IN_A_MESSAGE = ("role", "content")


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


def open_lines(path: Path, keys: PromptKeys, spill_dir: Path | None = None) -> BinaryIO:
    """The lines. What is not jsonl goes to a nameless temporary file, in `spill_dir` or the system's place for them.

    Raises DataError naming file and reason.
    """
    if path.suffix in PACKED:
        raise DataError(f"prompt data {path}: lines cannot be looked up in a {path.suffix} file; unpack it first, or pack it with gzip")
    has_tasks = is_tasks(path, keys.environment)
    try:
        if not has_tasks and path.suffix != ".gz" and path.suffix not in PARQUET:
            return path.open("rb")
        if spill_dir is not None:
            spill_dir.mkdir(parents=True, exist_ok=True)
        target = cast(BinaryIO, tempfile.TemporaryFile(dir=spill_dir))  # noqa: SIM115 - open as long as the rows are
    except OSError as bad:
        raise DataError(f"prompt data {path} cannot be read: {bad.strerror or bad}") from None
    try:
        if has_tasks:
            write_tasks(path.parent, keys, target)
        elif path.suffix == ".gz":
            _unpack(path, target)
        else:
            write_lines(path, keys, target)
        target.flush()
    except BaseException:
        target.close()
        raise
    return target


def _unpack(path: Path, target: IO[bytes]) -> None:
    try:
        with gzip.open(path) as reader:
            while piece := reader.read(COPY_BYTES):
                target.write(piece)
    except (EOFError, OSError, zlib.error) as bad:
        raise DataError(f"prompt data {path} cannot be unpacked: {bad}") from None


def write_lines(path: Path, keys: PromptKeys, target: BinaryIO) -> None:
    """Write the columns that `keys` names, one line of JSON a row. Raises DataError naming file, column and reason.

    Prompts are text, or a list of structs with a `role`; metadata is a struct or a map. Keys that are null in a message or a tool are left
    out, for parquet gives each struct of a column the same keys.
    """
    encode = msgspec.json.Encoder().encode
    with _opened(path, keys) as (file, columns):
        for batch in file.iter_batches(BATCH_ROWS, columns=columns, use_threads=False):
            target.writelines(encode(_plain(fields, keys)) + b"\n" for fields in batch.to_pylist())


def check_columns(path: Path, keys: PromptKeys) -> None:
    """Raise DataError where `write_lines` would before it has read a row."""
    with _opened(path, keys):
        pass


@contextlib.contextmanager
def _opened(path: Path, keys: PromptKeys) -> Iterator[tuple[Any, list[str]]]:
    """The file, and the columns to read."""
    arrow = _pyarrow(path)
    try:
        with arrow.parquet.ParquetFile(path, buffer_size=READ_BUFFER_BYTES, pre_buffer=False) as file:
            yield file, _columns(path, keys, file.schema_arrow, arrow.types)
    except (arrow.ArrowException, OSError, TypeError, ValueError) as bad:
        raise DataError(f"prompt data {path} cannot be read as parquet: {bad}") from None


def _columns(path: Path, keys: PromptKeys, schema: Any, types: Any) -> list[str]:
    """The columns to read, of types that can be read."""
    kinds = {field.name: field.type.value_type if types.is_dictionary(field.type) else field.type for field in schema}
    if keys.prompt not in kinds:
        raise DataError(f"{path}: no column {keys.prompt!r} (input_key); it has {', '.join(map(repr, list(kinds)[:12]))}")
    prompt = kinds[keys.prompt]
    if not _is_text(types, prompt) and not _is_list_of_structs(types, prompt, "role"):
        raise DataError(f"{path}: column {keys.prompt!r} is {prompt}; expected text, or a list of structs with a 'role'")
    metadata, tools = kinds.get(keys.metadata), kinds.get(keys.tools)
    is_map = metadata is not None and types.is_map(metadata) and _is_text(types, metadata.key_type)
    if not (metadata is None or is_map or types.is_struct(metadata) or types.is_null(metadata)):
        raise DataError(f"{path}: column {keys.metadata!r} is {metadata}; expected a struct, or a map with text keys")
    if tools is not None and not _is_list_of_structs(types, tools):
        raise DataError(f"{path}: column {keys.tools!r} is {tools}; expected a list of structs")
    return [name for name in kinds if name in {keys.prompt, keys.label, keys.metadata, keys.tools}]


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"prompt data {path}: reading parquet needs pyarrow; pip install 'slimebus[parquet]'") from None
    return pyarrow


def _plain(fields: dict[str, Any], keys: PromptKeys) -> dict[str, Any]:
    for key in (keys.prompt, keys.tools):
        if isinstance(fields.get(key), list):
            fields[key] = _without_nulls(fields[key])
    if isinstance(fields.get(keys.metadata), list):  # a map column gives pairs
        fields[keys.metadata] = dict(fields[keys.metadata])
    return fields


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in ALWAYS_IN_A_MESSAGE}
    return value


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_list_of_structs(types: Any, kind: Any, key: str = "") -> bool:
    is_list = types.is_list(kind) or types.is_large_list(kind)
    return bool(is_list and types.is_struct(kind.value_type) and (not key or kind.value_type.get_field_index(key) >= 0))

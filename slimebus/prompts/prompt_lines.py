"""Prompts of any file format as a file of JSON lines: jsonl as it is; .gz, parquet and the tasks of an environment written anew."""

import gzip
import tempfile
import zlib
from pathlib import Path
from typing import IO, BinaryIO, cast

from slimebus.bus.errors import DataError
from slimebus.prompts.prompt_parquet import write_lines
from slimebus.prompts.prompt_record import PromptKeys
from slimebus.prompts.verifiers_tasks import is_tasks, write_tasks

COPY_BYTES = 4 * 1024 * 1024
PARQUET = (".parquet", ".pq")
PACKED = (".zst", ".bz2", ".xz", ".zip")


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

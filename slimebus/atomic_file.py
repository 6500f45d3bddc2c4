"""Files that are replaced whole or not at all, and folders that only their owner can read."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = 0o644, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file to write; it takes the place of `path` in one move when the block ends, and is removed when the block raises.

    mode: its permissions. sync: the content is on disk before the move. Raises OSError that names `path`.
    A killed process leaves a file named `.NAME.PID.unfinished` beside `path`.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, mode)) as file:
            os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as bad:
        if bad.filename in (unfinished, str(unfinished)):
            bad.filename = str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner alone; one that is there keeps its mode."""
    for one in (*reversed(folder.absolute().parents), folder):
        one.mkdir(mode=0o700, exist_ok=True)

"""A small file system of its own for a test, where the machine allows mounting."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int, options: str = "") -> Iterator[Path]:
    """A tmpfs of `size_mib` at `folder`; skips the test with the reason where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mib}m{options}", "slimebus-test", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except OSError as bad:
        pytest.skip(f"no mount command: {bad}")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False, timeout=20)


def fill(folder: Path, leave_bytes: int = 0) -> Path:
    """Another program's file that takes what is free, but for `leave_bytes`; remove it to make room."""
    hog = folder / "hog"
    with hog.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while (free := os.statvfs(folder).f_bavail * 4096 - leave_bytes) > 0:
            file.write(b"\1" * min(free, 1 << 20))
    return hog

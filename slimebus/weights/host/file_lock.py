"""A file's lock says who is alive, also across containers that share memory and not process ids: the kernel releases it with its owner."""

import contextlib
import fcntl
import os
import time
from pathlib import Path

TOUCH_S = 1.0


class FileLock:
    """One process has it, until it gives it back or ends. The file's text is its process id."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._locked: int | None = None
        self._touched_at = 0.0

    @property
    def is_mine(self) -> bool:
        return self._locked is not None

    def acquire(self) -> bool:
        """True when it is mine now; never waits. A file that is not ours to open is somebody's lock."""
        if self._locked is None:
            try:
                descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError:
                return False
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_nlink:  # else the owner before has just given back, and deleted, what was opened
                    with contextlib.suppress(OSError):  # memory that is full: the lock holds all the same
                        os.ftruncate(descriptor, 0)
                        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                    self._locked = descriptor
                    return True
            os.close(descriptor)
        return self.is_mine

    def touch(self) -> None:
        """Once a second, the owner lets others know that it is at work."""
        if self._locked is not None and time.monotonic() - self._touched_at >= TOUCH_S:
            self._touched_at = time.monotonic()
            os.utime(self._locked)

    def release(self) -> None:
        """Does nothing when it is not mine."""
        if self._locked is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._locked)
            self._locked = None

    def stamp(self) -> tuple[int, int]:
        """Changes when the owner tells of itself, and with the owner."""
        with contextlib.suppress(OSError):
            status = self.path.stat()
            return status.st_ino, status.st_mtime_ns
        return 0, 0

    def owner(self) -> str:
        """For people."""
        with contextlib.suppress(OSError, ValueError):
            return f"process {int(self.path.read_text()[:20])}"
        return f"the owner of {self.path}"

"""Room on the disk: how much is left, and a reserve that what frees room can always use.

    |<------------------------- the file system ------------------------->|
    | others | data.mdb: used | data.mdb: free pages | reserve |   free   |
                                                     `-- given up for the commit that finds no room

New samples are refused while less than one more reserve is free. Commits that free room go on; should one of them find no
room all the same (another process was faster, or a quota), the reserve file is removed and the commit tried once more.
"""

import contextlib
import os
import time
from pathlib import Path

RESERVE_BYTES = 64 * 1024 * 1024
SMALL_DISK = 16
"""Of a small file system, at most this part (a 16th) is kept as reserve."""
LOOK_S = 0.5
"""How old a look at the disk may be, unless much was written since."""


def free_bytes(folder: Path) -> int:
    """What this user may still write on the file system of `folder`."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


class Reserve:
    """A file of real blocks beside the store, to be given up when a commit finds no room. Absent while there is no room for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "reserve"
        found = os.statvfs(folder)
        self.size_bytes = min(RESERVE_BYTES, found.f_blocks * found.f_frsize // SMALL_DISK)
        self._tried_at = float("-inf")
        self.is_held = self._take()

    def release(self) -> bool:
        """Give it up; False when it was gone already."""
        was_held, self.is_held = self.is_held, False
        with contextlib.suppress(OSError):
            self.path.unlink()
        self._tried_at = time.monotonic()
        return was_held

    def restore(self) -> bool:
        """Take it again where there is room for it twice; looks at most every half second. True while it is held."""
        if not self.is_held and time.monotonic() - self._tried_at >= LOOK_S:
            self.is_held = self._take()
        return self.is_held

    def _take(self) -> bool:
        self._tried_at = time.monotonic()
        try:
            if self.path.exists() and self.path.stat().st_blocks * 512 >= self.size_bytes:
                return True
            self.path.unlink(missing_ok=True)
            if free_bytes(self.folder) < 2 * self.size_bytes:
                return False
            with self.path.open("ab") as file:
                os.posix_fallocate(file.fileno(), 0, self.size_bytes)
        except OSError:
            with contextlib.suppress(OSError):
                self.path.unlink()
            return False
        return True

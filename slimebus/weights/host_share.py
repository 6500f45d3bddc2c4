"""One worker of a host pulls, and its neighbours take what it pulled out of shared memory.

    who has the turn (a locked file)        the others
    pulls what no folder here has    -----> take each tensor once it is verified; wait for the turn; look again
    gives the turn back                     pull what is still missing: as a rule nothing

Nobody trusts anybody: manifests, and with them hashes, come from the publisher, and each worker hashes what it takes. The turn of
a killed worker goes to the next by the kernel's hand; one whose worker is not heard of for PATIENCE_S is not waited for.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from slimebus.errors import WeightsError
from slimebus.weights.messages import TensorEntry
from slimebus.weights.plan import Plan, Target
from slimebus.weights.shared_folder import SharedFolder
from slimebus.weights.tensors import hash_bytes

log = logging.getLogger("slimebus.weights")

PREFIX = "slimebus-turn-"
TELL_S = 1.0
PATIENCE_S = 10.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.1


class Turn:
    """The lock of a file: one process has it, until it gives it back or ends. The file's text is its process id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._locked: int | None = None
        self._told_at = 0.0

    @property
    def is_mine(self) -> bool:
        return self._locked is not None

    def take(self) -> bool:
        """True when it is mine now; never waits. A file that is not ours to open is somebody's turn."""
        if self._locked is None:
            try:
                descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
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

    def tell(self) -> None:
        """Once a second, the owner lets others know that it is at work."""
        if self._locked is not None and time.monotonic() - self._told_at >= TELL_S:
            self._told_at = time.monotonic()
            os.utime(self._locked)

    def give_back(self) -> None:
        """Does nothing when it is not mine."""
        if self._locked is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._locked)
            self._locked = None

    def stamp(self) -> tuple[int, int]:
        """Changes when the owner tells of itself, and with the owner."""
        with contextlib.suppress(OSError):
            status = self._path.stat()
            return status.st_ino, status.st_mtime_ns
        return 0, 0

    def owner(self) -> str:
        """For people."""
        with contextlib.suppress(OSError, ValueError):
            return f"process {int(self._path.read_text()[:20])}"
        return f"whoever made {self._path}"


class HostShare:
    """What the workers of one user on one host do for each other in a pull. Used by one thread.

    place: what is pulled from, the same text for each worker of a run; those of other runs have turns of their own.
    """

    def __init__(self, folder: SharedFolder, place: str) -> None:
        self.folder, self._place = folder, place
        self._turn = Turn(folder.root / f"{PREFIX}{os.geteuid()}-{hash_bytes(place.encode())[:16]}")
        self._hung: tuple[int, int] | None = None

    @property
    def is_puller(self) -> bool:
        """It is this worker's turn: what is missing on this host it pulls, and may pass on."""
        return self._turn.is_mine

    def begin(self) -> None:
        """A pull begins. Raises WeightsError when the folder is gone."""
        self.folder.check_room(0)
        self._turn.take()

    def tell(self) -> None:
        """The pull goes on: to be called now and then."""
        self._turn.tell()

    def end(self) -> None:
        """The pull is over, well or not. Its unfinished files go, and the turn to the next."""
        self.folder.discard_unfinished()
        self._turn.give_back()

    def share(self, plan: Plan, entries: Sequence[TensorEntry], target: Target, *, until: float, cancelled: threading.Event) -> bool:
        """Take what this host has. True: go on, all is there or it is this worker's turn; False: it is now, ask for manifests again.

        Waits while a neighbour pulls. Raises WeightsError when it still does at the monotonic time `until`.
        """
        self._take(plan, entries, target)
        if self._turn.is_mine or self._turn.stamp() == self._hung or not plan.lacks(entries):
            return True
        stamp, heard_at, look_s, began_at = self._turn.stamp(), time.monotonic(), FIRST_LOOK_S, time.monotonic()
        while not self._turn.take():
            now = time.monotonic()
            if now >= until:
                raise WeightsError(
                    f"{self._turn.owner()} on this host pulls from {self._place}; this one waited {now - began_at:.0f} s for it"
                )
            if self._turn.stamp() != stamp:
                stamp, heard_at = self._turn.stamp(), now
            if now - heard_at > PATIENCE_S:
                log.warning("%s on this host, which pulls from %s, was not heard of for %.0f s; not waiting for it",
                            self._turn.owner(), self._place, PATIENCE_S)  # fmt: skip
                self._hung = stamp  # until it shows another sign of life
                return False
            if cancelled.wait(look_s):
                raise WeightsError("the pull was cancelled")
            look_s = min(1.5 * look_s, LONGEST_LOOK_S)
            self._take(plan, entries, target)
            if not plan.lacks(entries):
                return True
        self._take(plan, entries, target)
        return not plan.lacks(entries)

    def _take(self, plan: Plan, entries: Sequence[TensorEntry], target: Target) -> None:
        for form, buffer, is_neighbours in self.folder.find(plan.lacks(entries)):
            plan.adopt(form, buffer, target)
            if is_neighbours:
                plan.counts.neighbour_tensors += 1
                plan.counts.neighbour_bytes += form.size


def sweep_turns(root: Path) -> None:
    """Delete the files of turns whose owner was killed and that nobody has taken since."""
    for path in root.glob(f"{PREFIX}{os.geteuid()}-*"):
        turn = Turn(path)
        with contextlib.suppress(OSError):
            if turn.take():
                turn.give_back()

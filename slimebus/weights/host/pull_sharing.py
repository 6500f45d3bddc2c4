"""One worker of a host pulls, and its neighbours take what it pulled out of shared memory.

    who has the lock (of a file)            the others
    pulls what no folder here has    -----> take each tensor once it is verified; wait for the lock; look again
    releases the lock                       pull what is still missing: usually nothing

No worker trusts another: manifests, and with them hashes, come from the publisher, and each worker hashes what it takes. The kernel
releases the lock of a killed worker; a worker that shows no sign of life for LOCK_SILENCE_S is not waited for.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slimebus.bus.errors import WeightsError
from slimebus.weights.host.file_lock import FileLock
from slimebus.weights.host.shared_folder import LOCK_PREFIX, SharedFolder
from slimebus.weights.messages import TensorEntry
from slimebus.weights.tensors import checksum

if TYPE_CHECKING:
    from slimebus.weights.pull.plan import Plan
    from slimebus.weights.tensors import Target

log = logging.getLogger("slimebus.weights")

LOCK_SILENCE_S = 10.0
FIRST_LOOK_S, LONGEST_LOOK_S = 0.005, 0.1


class HostPullSharing:
    """What the workers of one user on one host do for each other in a pull. Used by one thread.

    place: what is pulled from, the same text for each worker of a run; those of other runs have turns of their own.
    """

    def __init__(self, folder: SharedFolder, place: str) -> None:
        self.folder, self._place = folder, place
        self._lock = FileLock(folder.root / f"{LOCK_PREFIX}{os.geteuid()}-{checksum(place.encode())[:16]}")
        self.touch = self._lock.touch
        """The pull goes on: to be called now and then."""
        self._hung: tuple[int, int] | None = None

    @property
    def is_puller(self) -> bool:
        """This worker has the lock: it pulls what is missing on this host, and may pass it on."""
        return self._lock.is_mine

    def begin(self) -> None:
        """A pull begins. Raises WeightsError when the folder is gone."""
        self.folder.check_room(0)
        self._lock.acquire()

    def end(self) -> None:
        """The pull is over, well or not. Its unfinished files are deleted, and the lock released."""
        self.folder.discard_unfinished()
        self._lock.release()

    def share(self, plan: "Plan", entries: Sequence[TensorEntry], target: "Target", *, until: float, cancelled: threading.Event) -> bool:
        """Take what this host has. True: all is there, or this worker has the lock; False: it has now, ask for manifests again.

        Waits while a neighbour pulls. Raises WeightsError when it still does at the monotonic time `until`.
        """
        self._take(plan, entries, target)
        stamp, heard_at, look_s, began_at = self._lock.stamp(), time.monotonic(), FIRST_LOOK_S, time.monotonic()
        while plan.lacks(entries) and not self._lock.is_mine and self._lock.stamp() != self._hung:
            if self._lock.acquire():
                self._take(plan, entries, target)
                return not plan.lacks(entries)
            now = time.monotonic()
            if now >= until:
                owner = f"{self._lock.owner()} on this host pulls from {self._place}"
                raise WeightsError(f"{owner}; this one waited {now - began_at:.0f} s for it")
            if self._lock.stamp() != stamp:
                stamp, heard_at = self._lock.stamp(), now
            if now - heard_at > LOCK_SILENCE_S:
                log.warning("%s on this host, which pulls from %s, was not heard of for %.0f s; not waiting for it",
                            self._lock.owner(), self._place, LOCK_SILENCE_S)  # fmt: skip
                self._hung = stamp  # until it shows another sign of life
                return False
            if cancelled.wait(look_s):
                raise WeightsError("the pull was cancelled")
            look_s = min(1.5 * look_s, LONGEST_LOOK_S)
            self._take(plan, entries, target)
        return True

    def _take(self, plan: "Plan", entries: Sequence[TensorEntry], target: "Target") -> None:
        for form, buffer, is_neighbours in self.folder.find(plan.lacks(entries)):
            plan.record_verified(form, buffer, target)
            if is_neighbours:
                plan.counts["neighbour_tensors"] += 1
                plan.counts["neighbour_bytes"] += form.size

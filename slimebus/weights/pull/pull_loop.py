"""What every puller does: rounds, until one ends with a verified version, the deadline comes, or it is cancelled; one pull for a host.

    the worker with the lock (of a file)    the other workers of this host
    pulls what no folder here has    -----> take each tensor once it is verified; wait for the lock; look again
    releases the lock                       pull what is still missing: usually nothing

No worker trusts another: manifests, and with them hashes, come from the publisher, and each worker hashes what it takes. The kernel
releases the lock of a killed worker; a worker that shows no sign of life for LOCK_SILENCE_S is not waited for.
"""

import logging
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from slimebus.bus.errors import SlimebusError, WeightsError
from slimebus.weights.host.file_lock import FileLock
from slimebus.weights.host.shared_folder import LOCK_PREFIX, SharedFolder
from slimebus.weights.messages import TensorEntry
from slimebus.weights.pull.plan import PullPlan
from slimebus.weights.tensors import Target, Weights, checksum
from slimebus.weights.threads import Stages

log = logging.getLogger("slimebus.weights")

LOCK_SILENCE_S = 10.0
FIRST_POLL_S, LONGEST_POLL_S = 0.005, 0.1


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

    def take_from_host_or_lock(
        self, plan: PullPlan, entries: Sequence[TensorEntry], target: Target, *, until: float, cancelled: threading.Event
    ) -> bool:
        """Take what this host has. True: all is there, or this worker has the lock; False: it has now, ask for manifests again.

        Waits while a neighbour pulls. Raises WeightsError when it still does at the monotonic time `until`.
        """
        self._take_from_host(plan, entries, target)
        stamp, heard_at, poll_s, began_at = self._lock.stamp(), time.monotonic(), FIRST_POLL_S, time.monotonic()
        while plan.lacks(entries) and not self._lock.is_mine and self._lock.stamp() != self._hung:
            if self._lock.acquire():
                self._take_from_host(plan, entries, target)
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
            if cancelled.wait(poll_s):
                raise WeightsError("the pull was cancelled")
            poll_s = min(1.5 * poll_s, LONGEST_POLL_S)
            self._take_from_host(plan, entries, target)
        return True

    def _take_from_host(self, plan: PullPlan, entries: Sequence[TensorEntry], target: Target) -> None:
        for form, buffer, is_neighbours in self.folder.find(plan.lacks(entries)):
            plan.record_verified(form, buffer, target)
            if is_neighbours:
                plan.counts["neighbour_tensors"] += 1
                plan.counts["neighbour_bytes"] += form.size


LOG_INTERVAL_S = 10.0


class RetryPull(Exception):
    """Not an error: the pull goes on with another round. The plan no longer holds; what is verified stays.

    adds_information: False for one that says less than what was wrong before.
    """

    def __init__(self, text: str, *, adds_information: bool = True) -> None:
        super().__init__(text)
        self.adds_information = adds_information


class PullLoop(ABC):
    """Used by one thread at a time; `cancel` and `close` may come from others. place: what is pulled from, for people.

    host: the workers of this host, which pull once for all of them; tensors then come to be in its folder.
    stages: seconds of the last pull. `wire`: it waited for bytes and took them; `verify`: it made and verified tensors and did nothing
    else. What is verified beside the wire is in neither.
    counts: since it was made, received_bytes, delta_tensors, full_tensors, wrong_bytes, rounds, from_workers (rounds in which payloads came
    from other workers), bad_sources; neighbour_tensors, neighbour_bytes: from other workers of this host, through shared memory.
    """

    def __init__(self, place: str, host: HostPullSharing | None) -> None:
        self._place, self._host = place, host
        self._cancelled = threading.Event()
        self._pulling = threading.Lock()
        self._unfinished: PullPlan | None = None
        self.counts: Counter[str] = Counter()
        self.stages = Stages()

    @abstractmethod
    def _pull_once(self, plan: PullPlan, deadline: float) -> Weights:
        """One attempt. Raises RetryPull for the next, and SlimebusError where none would help."""

    def pull(self, have: Weights | None = None, deadline_s: float = 60.0) -> Weights:
        """The newest complete version; `have` itself when it is that.

        Survives lost connections, restarted servers and newer versions that appear meanwhile. Raises WeightsError when no version
        verified within deadline_s seconds; what did verify is not pulled again by the next pull from the same `have`.
        """
        with self._pulling:
            self.stages = Stages()
            plan, self._unfinished = self._unfinished, None
            if plan is None or plan.have is not have:
                plan = PullPlan(have, folder=self._host.folder if self._host else None, counts=self.counts)
            if self._host is not None:
                self._host.begin()
            try:
                return self._pull(plan, deadline_s)
            except SlimebusError as bad:
                self._unfinished = plan.for_next_pull()
                if isinstance(bad, WeightsError):
                    raise
                raise WeightsError(bad.text, code=bad.code, retryable=bad.retryable) from None
            finally:
                if self._host is not None:
                    self._host.end()

    def _pull(self, plan: PullPlan, deadline_s: float) -> Weights:
        logged_at = time.monotonic()
        deadline, reason, rounds_without_progress = logged_at + deadline_s, "", 0
        while not self._cancelled.is_set():
            verified_before = plan.num_verified
            try:
                return self._pull_once(plan, deadline)
            except RetryPull as unfinished:
                reason = str(unfinished) if unfinished.adds_information or not reason else reason
            self.counts["rounds"] += 1
            rounds_without_progress = rounds_without_progress + 1 if plan.num_verified == verified_before else 0
            now = time.monotonic()
            if now >= deadline:
                raise WeightsError(f"no verified version within {deadline_s:.0f} s from {self._place}: {reason}")
            if now - logged_at > LOG_INTERVAL_S:
                logged_at = now
                log.warning("no verified version from %s so far: %s", self._place, reason)
            self._cancelled.wait(_pause_s(rounds_without_progress))
        raise WeightsError("the pull was cancelled")

    def cancel(self) -> None:
        """End a pull that another thread waits for; for good."""
        self._cancelled.set()

    close = cancel


def _pause_s(rounds_without_progress: int) -> float:
    """Jittered, from 5 ms to half a second while rounds verify nothing."""
    return random.uniform(0.5, 1.0) * min(0.5, 0.005 * 2.0 ** min(rounds_without_progress, 10))

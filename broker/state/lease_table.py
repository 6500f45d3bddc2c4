"""The leases that workers hold, until when each lives, and what became of the last ones.

    granted --"unconfirmed lease"--> named by a heartbeat --"leases of" its worker--> put, given back or expired
                                     `-> recalled --"recalled lease"--> given back or ended

A lease that no heartbeat has named ends by itself; those that a worker has named live as long as it is heard.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from broker.state.groups import Group, Groups
from broker.state.timers import Key, Timers

MAX_RESULTS = 4096
RECENT = 64


class LeaseTable:
    """The deadlines of the leases of `groups`, with the verbs that move them. A deadline is a time of the machine's clock.

    held_since: lease -> when it was granted, or when this process began. results: lease -> accepted, discarded or surplus, of the last
    ones, so that a repeat is not counted again. num_recalls: so far, for hints. group_seconds: from lease to put, of the last groups.
    """

    def __init__(self, groups: Groups, timers: Timers) -> None:
        self._groups, self._timers = groups, timers
        self.held_since: dict[int, float] = {}
        self.results: dict[int, str] = {}
        self.num_recalls = 0
        self.group_seconds: deque[float] = deque(maxlen=RECENT)

    def restart(self, now: float, deadline: float) -> None:
        """After a restart: every lease counts as named by its worker, and has until `deadline`."""
        self.held_since = dict.fromkeys(self._groups.by_lease, now)
        for lease, group in self._groups.by_lease.items():
            if group.lease.is_recalled:
                self._timers.set(("recalled lease", lease), deadline)
        for worker in self._groups.by_worker:
            self._timers.set(("leases of", worker), deadline)

    def grant(self, group: Group, now: float, deadline: float) -> None:
        """A worker got this group, which has its new lease."""
        self.held_since[group.lease.id] = now
        self.unconfirm([group.lease.id], deadline)

    def unconfirm(self, leases: Iterable[int], deadline: float) -> None:
        """Their worker has not named these leases: they end at `deadline` unless it does."""
        for lease in leases:
            self._groups.unconfirm(lease)
            self._timers.set(("unconfirmed lease", lease), deadline)

    def confirm(self, leases: Iterable[int]) -> None:
        """Their worker names these leases: from now on they live as long as its others."""
        for lease in leases:
            self._groups.confirm(lease)
            self._timers.cancel(("unconfirmed lease", lease))

    def extend(self, worker: str, deadline: float) -> None:
        """A worker is heard: the leases that it has named live on."""
        leases = self._groups.by_worker.get(worker)
        if leases is not None and len(leases.groups) > len(leases.unconfirmed):
            self._timers.set(("leases of", worker), deadline)

    def recall(self, group: Group, deadline: float) -> None:
        """A worker has to give a group back until `deadline`."""
        self._groups.set_lease(group, msgspec.structs.replace(group.lease, is_recalled=True))
        self._timers.set(("recalled lease", group.lease.id), deadline)
        self.num_recalls += 1

    def end(self, group: Group) -> None:
        """A group is leased no more."""
        lease = group.lease
        self._timers.cancel(("unconfirmed lease", lease.id))
        self._timers.cancel(("recalled lease", lease.id))
        self.held_since.pop(lease.id, None)
        if lease.worker not in self._groups.by_worker:
            self._timers.cancel(("leases of", lease.worker))

    def record_put(self, group: Group, now: float) -> None:
        """A group that is leased was put."""
        self.group_seconds.append(now - self.held_since[group.lease.id])

    def remember(self, lease: int, result: str) -> None:
        """Keep what became of a lease; of more than MAX_RESULTS the oldest is forgotten."""
        self.results[lease] = result
        if len(self.results) > MAX_RESULTS:
            del self.results[next(iter(self.results))]

    def deadline_of(self, group: Group) -> float:
        """When a lease ends if nothing is heard of it."""
        return self._timers.deadline(("unconfirmed lease", group.lease.id), ("leases of", group.lease.worker))

    def needed_timers(self) -> Iterator[Key]:
        """The timers that there must be."""
        for worker, leases in self._groups.by_worker.items():
            yield from (("unconfirmed lease", lease) for lease in leases.unconfirmed)
            if len(leases.groups) > len(leases.unconfirmed):
                yield "leases of", worker
        yield from (("recalled lease", lease) for lease, group in self._groups.by_lease.items() if group.lease.is_recalled)

"""The life of a group, and the tables that find groups by state.

(source) -> QUEUED -> LEASED -> READY -> ASSIGNED(step) -> COMMITTED -> (freed under a checkpoint)
               ^         |        |          |                |
               +---------+--------+----------+----------------+    expired, returned, stale, rewound
                         |        |                    DROPPED(reason), DEAD(reason): ended, listed, counted
"""

import bisect
import heapq
from collections import Counter
from typing import Literal

import msgspec

from broker.state.arrivals import Arrivals
from slimebus.errors import SlimebusError
from slimebus.messages import NO_VERSION

Phase = Literal["queued", "leased", "ready", "assigned", "committed", "dropped", "dead"]
QUEUED: Phase = "queued"
LEASED: Phase = "leased"
READY: Phase = "ready"
ASSIGNED: Phase = "assigned"
COMMITTED: Phase = "committed"
DROPPED: Phase = "dropped"
DEAD: Phase = "dead"

TRAIN, EVAL = "train", "eval"

ALLOWED: dict[Phase, tuple[Phase, ...]] = {
    QUEUED: (LEASED, DROPPED),
    LEASED: (READY, QUEUED, DROPPED, DEAD),
    READY: (ASSIGNED, QUEUED, DROPPED),
    ASSIGNED: (COMMITTED, READY, QUEUED),
    COMMITTED: (READY, QUEUED),
    DROPPED: (),
    DEAD: (),
}


def field_key(group: str, name: str) -> str:
    """Where a late field is kept."""
    return f"{group}\n{name}"


class LateField(msgspec.Struct, array_like=True, gc=False):
    """A field that a consumer put after the samples. digest: xxh3_128 of its bytes."""

    name: str
    by: str
    dtype: str
    shapes: list[list[int]]
    digest: bytes
    size_bytes: int


class SecondLease(msgspec.Struct, array_like=True, gc=False):
    """The other lease of a hedged group, in the words of the first."""

    lease: int
    worker: str
    request: int
    attempt: int
    lineage: str
    version: int


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One prompt on its way. `position` orders prompts, `admitted` orders leases (FIFO into batches).

    Sizes and versions speak of the samples of the accepted attempt: num_samples and num_tokens without failed samples,
    oldest and newest version over their trainable and all tokens, the steps trained behind the newest. num_frames counts the stored
    frames, header included. second: the other lease, while it is hedged; hedge_attempt: the last attempt that was one.
    lengths: tokens of every sample, failed ones too; fields: names beyond the usual three; arrival: the position for consumers.
    The partial_ fields say the same of samples that a leaving worker had not finished (broker/state/partials.py).
    """

    id: str
    position: int
    kind: str = TRAIN
    phase: Phase = QUEUED
    attempt: int = 0
    failures: int = 0
    admitted: int = 0
    lease: int = 0
    request: int = 0
    worker: str = ""
    lineage: str = ""
    lease_version: int = NO_VERSION
    lease_samples: int = 0
    step: int = -1
    put_attempt: int = 0
    num_samples: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_frames: int = 0
    size_bytes: int = 0
    oldest_version: int = NO_VERSION
    newest_version: int = NO_VERSION
    steps_behind: int = 0
    reward_mean: float = 0.0
    reward_std: float = 0.0
    rewards: list[float | None] = []
    told_attempt: int = 0
    evaluation: str = ""
    dataset: str = ""
    row: int = -1
    reason: str = ""
    partial_frames: int = 0
    partial_tokens: int = 0
    partial_oldest: int = NO_VERSION
    partial_newest: int = NO_VERSION
    partial_steps: int = 0
    arrival: int = 0
    lengths: list[int] = []
    fields: list[str] = []
    late: list[LateField] = []
    second: SecondLease | None = None
    hedge_attempt: int = 0

    def lease_of(self, worker: str) -> tuple[int, int]:
        """Lease and attempt of a worker that holds this group."""
        if self.second is not None and self.second.worker == worker:
            return self.second.lease, self.second.attempt
        return self.lease, self.attempt

    def holder_of(self, lease: int) -> str:
        """Who holds it by this lease."""
        return self.second.worker if self.second is not None and self.second.lease == lease else self.worker


class Groups:
    """Every group in play, found by id, lease, or state. Changes of state go through `move` alone."""

    def __init__(self) -> None:
        self.by_id: dict[str, Group] = {}
        self.by_lease: dict[int, Group] = {}
        self._by_worker: dict[str, dict[int, Group]] = {}
        self._by_request: dict[tuple[str, int], list[Group]] = {}
        self.counts: Counter[tuple[str, Phase]] = Counter()
        self.ready: list[tuple[int, str]] = []
        self.ready_tokens = 0
        self._tokens: dict[str, int] = {}
        self._queues: dict[str, list[tuple[int, str]]] = {TRAIN: [], EVAL: []}
        self.arrivals: Arrivals[Group] = Arrivals()
        self.required: frozenset[str] = frozenset()
        self.held: dict[str, Group] = {}

    def add(self, group: Group) -> None:
        """Take in a group in the state it is in."""
        self.by_id[group.id] = group
        self._enter(group)
        if group.arrival:
            self.arrivals.add(group)

    def remove(self, group: Group) -> None:
        """Let go of a group."""
        self._leave(group)
        self.depart(group)
        del self.by_id[group.id]

    def move(self, group: Group, phase: Phase) -> None:
        """Change state. Raises SlimebusError `illegal_transition` for a step that the life of a group does not have."""
        if phase not in ALLOWED[group.phase]:
            raise SlimebusError(f"group {group.id}: {group.phase} cannot become {phase}", code="illegal_transition")
        self._leave(group)
        group.phase = phase
        self._enter(group)

    def count(self, phase: Phase, kind: str = TRAIN) -> int:
        """How many groups of a kind are in a state."""
        return self.counts[kind, phase]

    def leased_by(self, worker: str) -> list[Group]:
        """The groups that a worker holds, oldest lease first."""
        return list(self._by_worker.get(worker, {}).values())

    def num_leased_by(self, worker: str) -> int:
        """How many groups a worker holds."""
        return len(self._by_worker.get(worker, ()))

    def leased_at(self, worker: str, request: int) -> list[Group]:
        """The groups that a worker still holds of those that one request of it was granted."""
        return list(self._by_request.get((worker, request), ()))

    def leased_for_training(self) -> list[Group]:
        """The leased training groups, oldest lease first."""
        return [group for lease, group in self.by_lease.items() if group.kind == TRAIN and group.lease == lease]

    def first_queued(self, kind: str = TRAIN) -> Group | None:
        """The queued group of the earliest prompt."""
        queue = self._queues[kind]
        while queue:
            group = self.by_id.get(queue[0][1])
            if group is not None and group.phase == QUEUED and group.position == queue[0][0]:
                return group
            heapq.heappop(queue)
        return None

    def first_ready(self, count: int) -> list[Group]:
        """The `count` earliest admitted ready groups."""
        return [self.by_id[group_id] for _, group_id in self.ready[:count]]

    def every_ready(self) -> list[Group]:
        """The ready groups, those that lack a required field too."""
        return [*self.first_ready(len(self.ready)), *self.held.values()]

    def arrive(self, group: Group, position: int) -> None:
        """Samples of a group were accepted: consumers find it at this position."""
        group.arrival = position
        self.arrivals.add(group)

    def depart(self, group: Group) -> None:
        """The samples of a group are gone."""
        if group.arrival:
            self.arrivals.remove(group)
            group.arrival = 0

    def completed(self, group: Group) -> None:
        """A group got more fields: it may be batched once it has all that are required."""
        if group.id in self.held and not self._lacks(group):
            del self.held[group.id]
            self._offer(group)

    def _lacks(self, group: Group) -> bool:
        return bool(self.required) and not self.required.issubset([*group.fields, *(f.name for f in group.late)])

    def _enter(self, group: Group) -> None:
        self.counts[group.kind, group.phase] += 1
        if group.phase == QUEUED:
            heapq.heappush(self._queues[group.kind], (group.position, group.id))
        elif group.phase == LEASED:
            self._enter_lease(group, group)
            if group.second is not None:
                self._enter_lease(group, group.second)
        elif group.phase == READY and self._lacks(group):
            self.held[group.id] = group
        elif group.phase == READY:
            self._offer(group)

    def _offer(self, group: Group) -> None:
        """A ready group may be batched."""
        bisect.insort(self.ready, (group.admitted, group.id))
        self._tokens[group.id] = group.num_tokens
        self.ready_tokens += group.num_tokens

    def _leave(self, group: Group) -> None:
        self.counts[group.kind, group.phase] -= 1
        if group.phase == LEASED:
            self._leave_lease(group, group)
            self.end_second(group)
        elif group.phase == READY and self.held.pop(group.id, None) is None:
            del self.ready[bisect.bisect_left(self.ready, (group.admitted, group.id))]
            self.ready_tokens -= self._tokens.pop(group.id)

    def lease_again(self, group: Group, second: SecondLease) -> None:
        """A leased group is leased to another worker as well."""
        group.second = second
        self._enter_lease(group, second)

    def end_second(self, group: Group) -> None:
        """End the second lease of a group, where it has one."""
        if group.second is not None:
            self._leave_lease(group, group.second)
            group.second = None

    def _enter_lease(self, group: Group, held: Group | SecondLease) -> None:
        self.by_lease[held.lease] = group
        self._by_worker.setdefault(held.worker, {})[held.lease] = group
        self._by_request.setdefault((held.worker, held.request), []).append(group)

    def _leave_lease(self, group: Group, held: Group | SecondLease) -> None:
        del self.by_lease[held.lease]
        of_worker, granted = self._by_worker[held.worker], self._by_request[held.worker, held.request]
        del of_worker[held.lease]
        granted.remove(group)
        if not of_worker:
            del self._by_worker[held.worker]
        if not granted:
            del self._by_request[held.worker, held.request]

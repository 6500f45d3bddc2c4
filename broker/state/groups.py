"""The life of a group, and the tables that find groups by state.

(source) -> QUEUED -> LEASED -> READY -> ASSIGNED(step) -> COMMITTED -> (freed under a checkpoint)
               ^         |        |          |                |
               +---------+--------+----------+----------------+    expired, returned, stale, rewound
                         |        |                    DROPPED(reason), DEAD(reason): ended, listed, counted
"""

from collections import Counter
from collections.abc import Iterator
from typing import Literal

import msgspec
from sortedcontainers import SortedKeyList

from slimebus.bus.messages import NO_VERSION

Phase = Literal["queued", "leased", "ready", "assigned", "committed", "dropped", "dead"]
QUEUED: Phase = "queued"
LEASED: Phase = "leased"
READY: Phase = "ready"
ASSIGNED: Phase = "assigned"
COMMITTED: Phase = "committed"
DROPPED: Phase = "dropped"
DEAD: Phase = "dead"
WITH_SAMPLES = (READY, ASSIGNED, COMMITTED)
"""Phases in which samples of a group are stored."""

TRAIN, EVAL = "train", "eval"


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


class LeaseRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A worker's right to one group. request: the id of the request that was granted it; version: what the worker served, of `lineage`
    (NO_VERSION: it needs no weights). num_samples: that it was asked for. is_recalled: it is to be given back.
    """

    id: int = 0
    worker: str = ""
    request: int = 0
    lineage: str = ""
    version: int = NO_VERSION
    num_samples: int = 0
    is_recalled: bool = False


class Partial(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Samples that a leaving worker had not finished (broker/state/partials.py); sizes and versions as in Group."""

    num_frames: int = 0
    num_tokens: int = 0
    oldest_version: int = NO_VERSION
    newest_version: int = NO_VERSION
    steps_behind: int = 0


NO_LEASE, NO_PARTIAL = LeaseRecord(), Partial()


class Group(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """One prompt on its way. `position` orders prompts, the number of the lease orders batches (first in, first out).

    lease: the present one, or the last; its number names the attempt. put_lease: the last with accepted samples. failures:
    attempts that failed; losses: workers lost with it since the last put; times_stale: how often it was too stale
    (broker/state/transitions.py says what they lead to).
    Sizes and versions speak of the samples of the accepted attempt: num_samples and num_tokens without failed samples,
    oldest and newest version over their trainable and all tokens, the steps trained behind the newest. num_frames counts the stored
    frames, header included.
    lengths: tokens of every sample, failed ones too; fields: names beyond the usual three; read_position: the position for consumers;
    ended: orders the groups that have ended. drop_reason: it is dropped once the trainer does not have it any more.
    """

    id: str
    position: int
    kind: str = TRAIN
    phase: Phase = QUEUED
    failures: int = 0
    losses: int = 0
    times_stale: int = 0
    lease: LeaseRecord = NO_LEASE
    put_lease: int = 0
    step: int = -1
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
    reported_lease: int = 0
    evaluation: str = ""
    dataset: str = ""
    row: int = -1
    reason: str = ""
    partial: Partial = NO_PARTIAL
    read_position: int = 0
    ended: int = 0
    drop_reason: str = ""
    lengths: list[int] = []
    fields: list[str] = []
    late: list[LateField] = []

    @property
    def late_names(self) -> list[str]:
        """Names of its late fields."""
        return [field.name for field in self.late]


class WorkerLeases(msgspec.Struct):
    """The leases of one worker. `unconfirmed`: those that no heartbeat of it has named yet, each with its own deadline."""

    groups: dict[int, Group] = {}
    by_request: dict[int, dict[int, Group]] = {}
    unconfirmed: set[int] = set()


class Groups:
    """Every group in play, found by id, lease, or state. Changes of state go through `move` alone.

    ready: those that may be batched, by lease; ready_tokens: of all these. awaiting_fields: ready ones that lack a field of `required`.
    by_read_position: every group with samples, by the position at which consumers read it; readable_changes rises when there may be more
    to read.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Group] = {}
        self.by_lease: dict[int, Group] = {}
        self.by_worker: dict[str, WorkerLeases] = {}
        self.counts: Counter[tuple[str, Phase]] = Counter()
        self.ready = SortedKeyList(key=lambda group: group.lease.id)
        self.ready_tokens, self._tokens = 0, dict[str, int]()
        self.by_read_position = SortedKeyList(key=lambda group: group.read_position)
        self.readable_changes = 0
        self.required: frozenset[str] = frozenset()
        self.awaiting_fields: dict[str, Group] = {}
        self._queues = {kind: SortedKeyList(key=lambda group: (group.position, group.id)) for kind in (TRAIN, EVAL)}

    def add(self, group: Group) -> None:
        """Take in a group in the state it is in."""
        self.by_id[group.id] = group
        self._enter(group)
        if group.read_position:
            self.index_for_consumers(group, group.read_position)

    def remove(self, group: Group) -> None:
        """Let go of a group."""
        self._leave(group)
        self.unindex(group)
        del self.by_id[group.id]

    def move(self, group: Group, phase: Phase) -> None:
        """Change state."""
        self._leave(group)
        group.phase = phase
        self._enter(group)

    def count(self, phase: Phase, kind: str = TRAIN) -> int:
        """How many groups of a kind are in a state."""
        return self.counts[kind, phase]

    def leased_by(self, worker: str) -> list[Group]:
        """The groups that a worker holds, oldest lease first."""
        leases = self.by_worker.get(worker)
        return [] if leases is None else list(leases.groups.values())

    def leased_at(self, worker: str, request: int) -> list[Group]:
        """The groups that a worker still holds of those that one request of it was granted."""
        leases = self.by_worker.get(worker)
        return [] if leases is None else list(leases.by_request.get(request, {}).values())

    def leased_for_training(self) -> list[Group]:
        """The leased training groups, oldest lease first."""
        return [group for group in self.by_lease.values() if group.kind == TRAIN]

    def first_queued(self, kind: str = TRAIN) -> Group | None:
        """The queued group of the earliest prompt."""
        return next(iter(self._queues[kind]), None)

    def every_ready(self) -> list[Group]:
        """The ready groups, those that lack a required field too."""
        return [*self.ready, *self.awaiting_fields.values()]

    def readable_after(self, position: int) -> Iterator[Group]:
        """The groups with samples behind the position of a consumer, in order: there may be thousands."""
        readable: Iterator[Group] = self.by_read_position.irange_key(position, inclusive=(False, False))
        return readable

    def num_readable_after(self, position: int) -> int:
        """How many there are."""
        return len(self.by_read_position) - int(self.by_read_position.bisect_key_right(position))

    def index_for_consumers(self, group: Group, position: int) -> None:
        """Samples of a group were accepted: consumers find it at this position."""
        group.read_position = position
        self.by_read_position.add(group)
        self.readable_changes += 1

    def unindex(self, group: Group) -> None:
        """The samples of a group are gone."""
        if group.read_position:
            self.by_read_position.remove(group)
            self.readable_changes += 1
            group.read_position = 0

    def fields_added(self, group: Group) -> None:
        """A group got more fields: it may be batched once it has all that are required."""
        self.readable_changes += 1
        if group.id in self.awaiting_fields and not self._lacks_field(group):
            del self.awaiting_fields[group.id]
            self._add_ready(group)

    def problems(self) -> Iterator[str]:
        """Where the indexes do not agree with the groups; nothing in a sound state."""
        everyone = self.by_id.values()
        counts = Counter((g.kind, g.phase) for g in everyone)
        if +self.counts != counts:
            yield f"counted {+self.counts}, there are {counts}"
        leased = {g.lease.id: g for g in everyone if g.phase == LEASED}
        if leased != self.by_lease:
            yield f"leases by number: {sorted(leased.keys() ^ self.by_lease.keys())}"
        if leased != {lease: g for worker in self.by_worker.values() for lease, g in worker.groups.items()}:
            yield "leases by worker are not the leases"
        ready = {g.id: g for g in everyone if g.phase == READY}
        listed = list(self.ready)
        if ready != {g.id: g for g in self.every_ready()} or listed != sorted(listed, key=lambda group: group.lease.id):
            yield "the ready groups are not those listed, or not in order"
        if self.ready_tokens != (num_tokens := sum(group.num_tokens for group in listed)):
            yield f"counted {self.ready_tokens} tokens of ready groups, there are {num_tokens}"
        for kind, queue in self._queues.items():
            queued = [(g.position, g.id) for g in everyone if g.kind == kind and g.phase == QUEUED]
            first = self.first_queued(kind)
            if [(g.position, g.id) for g in queue] != sorted(queued) or (first and (first.position, first.id)) != min(queued, default=None):
                yield f"the {kind} queue is not that of the queued groups, or not in order"
        if {g.id for g in self.by_read_position} != {g.id for g in everyone if g.read_position}:
            yield "the groups that consumers find are not those with a position"

    def _lacks_field(self, group: Group) -> bool:
        return bool(self.required) and not self.required.issubset([*group.fields, *group.late_names])

    def _enter(self, group: Group) -> None:
        self.counts[group.kind, group.phase] += 1
        if group.phase == QUEUED:
            self._queues[group.kind].add(group)
        elif group.phase == LEASED:
            self.by_lease[group.lease.id] = group
            leases = self.by_worker.setdefault(group.lease.worker, WorkerLeases())
            leases.groups[group.lease.id] = leases.by_request.setdefault(group.lease.request, {})[group.lease.id] = group
        elif group.phase == READY and self._lacks_field(group):
            self.awaiting_fields[group.id] = group
        elif group.phase == READY:
            self._add_ready(group)

    def _add_ready(self, group: Group) -> None:
        self.ready.add(group)
        self._tokens[group.id] = group.num_tokens
        self.ready_tokens += group.num_tokens

    def _leave(self, group: Group) -> None:
        self.counts[group.kind, group.phase] -= 1
        if group.phase == QUEUED:
            self._queues[group.kind].remove(group)
        elif group.phase == LEASED:
            leases = self.by_worker[group.lease.worker]
            granted = leases.by_request[group.lease.request]
            del self.by_lease[group.lease.id], leases.groups[group.lease.id], granted[group.lease.id]
            if not granted:
                del leases.by_request[group.lease.request]
            leases.unconfirmed.discard(group.lease.id)
            if not leases.groups:
                del self.by_worker[group.lease.worker]
        elif group.phase == READY and self.awaiting_fields.pop(group.id, None) is None:
            self.ready.remove(group)
            self.ready_tokens -= self._tokens.pop(group.id)  # its own are forgotten with its samples

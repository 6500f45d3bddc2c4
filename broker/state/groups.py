"""The life of a group, and the tables that find groups by state.

(source) -> QUEUED -> LEASED -> READY -> ASSIGNED(step) -> COMMITTED -> (freed under a checkpoint)
               ^         |        |          |                |
               +---------+--------+----------+----------------+    expired, returned, stale, rewound
                         |        |                    DROPPED(reason), DEAD(reason): ended, listed, counted
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec
from sortedcontainers import SortedKeyList

from slimebus.bus.messages import NO_VERSION
from slimebus.bus.sample_table import CheckedGroup, SampleFacts

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
    """Samples that a leaving worker had not finished (leases.py); sizes and versions as in Group."""

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


def version_range(samples: Sequence[SampleFacts]) -> tuple[int, int]:
    """The oldest version over the trainable tokens of some samples and the newest over all of them; NO_VERSION where there is none."""
    oldest = min((s.oldest_version for s in samples if s.oldest_version != NO_VERSION), default=NO_VERSION)
    return oldest, max((s.newest_version for s in samples), default=NO_VERSION)


def mean_and_deviation(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and (population) standard deviation; (0, 0) of nothing, and exactly 0 for equal rewards. Rewards within +-MAX_REWARD."""
    if not rewards:
        return 0.0, 0.0
    mean = math.fsum(rewards) / len(rewards)
    if min(rewards) == max(rewards):
        return mean, 0.0
    return mean, math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / len(rewards))


class WorkerLeases(msgspec.Struct):
    """The leases of one worker. `unconfirmed`: those that no heartbeat of it has named yet, each with its own deadline."""

    groups: dict[int, Group] = {}
    by_request: dict[int, dict[int, Group]] = {}
    unconfirmed: set[int] = set()


class Groups:
    """Every group in play, found by id, lease, or state. What changes of a group changes here alone; its phase only by `move`.

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

    def move(self, group: Group, phase: Phase, reason: str) -> None:
        """Change state."""
        self._leave(group)
        group.phase, group.reason = phase, reason
        if phase == QUEUED:
            group.step, group.rewards = -1, []
        elif phase == READY:
            group.step, group.losses = -1, 0
        self._enter(group)

    def end(self, group: Group, reason: str, number: int) -> None:
        """Let go of a group that has ended; `number` orders those."""
        self.remove(group)
        group.reason, group.ended = reason, number

    def set_lease(self, group: Group, lease: LeaseRecord) -> None:
        """A queued group is to be leased, or a leased one recalled."""
        group.lease = lease

    def unconfirm(self, lease: int) -> None:
        """A worker has not named a lease."""
        self.by_worker[self.by_lease[lease].lease.worker].unconfirmed.add(lease)

    def confirm(self, lease: int) -> None:
        """A worker names a lease."""
        self.by_worker[self.by_lease[lease].lease.worker].unconfirmed.discard(lease)

    def set_step(self, group: Group, step: int) -> None:
        """A ready group is to be trained in a step."""
        group.step = step

    def increment(self, group: Group, counter: str) -> int:
        """Raise `failures`, `losses` or `times_stale`; its new value."""
        count: int = getattr(group, counter) + 1
        setattr(group, counter, count)
        return count

    def drop_later(self, group: Group, reason: str) -> None:
        """Drop a group once the trainer does not have it any more."""
        group.drop_reason = reason

    def record_rewards(self, group: Group, rewards: list[float | None]) -> None:
        """What a stateful source is to know of an attempt."""
        group.rewards = rewards

    def mark_reported(self, group: Group) -> None:
        """A stateful source knows what became of the present attempt."""
        group.reported_lease = group.lease.id

    def keep_partial(self, group: Group, partial: Partial) -> None:
        """What a leaving worker had made of a group, in place of what there was."""
        group.partial = partial

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

    def mark_put(self, group: Group) -> None:
        """Samples of the present attempt have come."""
        group.put_lease = group.lease.id

    def describe(self, group: Group, made: CheckedGroup, steps_behind: int) -> None:
        """Note what the broker must know of the samples of a group; failed ones are only counted."""
        good = [s for s in made.samples if not s.has_failed]
        group.num_samples, group.num_failed = len(good), len(made.samples) - len(good)
        group.num_tokens = sum(s.num_tokens for s in good)
        group.lengths, group.fields = made.table.num_tokens, made.extras
        group.num_frames, group.size_bytes = len(made.frames), made.size_bytes
        group.oldest_version, group.newest_version = version_range(good)
        group.reward_mean, group.reward_std = mean_and_deviation([s.reward or 0.0 for s in good])
        group.steps_behind = steps_behind

    def forget_samples(self, group: Group) -> None:
        """The samples of a group are gone."""
        self.unindex(group)
        group.num_samples = group.num_tokens = group.num_frames = group.size_bytes = group.num_failed = group.steps_behind = 0
        group.oldest_version = group.newest_version = NO_VERSION
        group.lengths, group.fields, group.late = [], [], []

    def add_fields(self, group: Group, late: Sequence[LateField]) -> None:
        """A group gets more fields: it may be batched once it has all that are required."""
        group.late = [*group.late, *late]
        group.size_bytes += sum(field.size_bytes for field in late)
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

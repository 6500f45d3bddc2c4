"""The state that every decision reads and changes, and how changes become effects."""

from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import msgspec

from broker.state.buffer_filter import BufferFilter
from broker.state.effects import Address, Delete, Effect, Note, Notify, Record, Reply, Save, Table
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, LEASED, QUEUED, READY, TRAIN, Group, Groups, Phase, field_key
from broker.state.pace import Pace
from broker.state.records import (
    Client,
    ClientRecord,
    Consumer,
    Evaluation,
    Meta,
    Parked,
    PushRecord,
    Records,
    StepRecord,
)
from broker.state.rules import Rules
from broker.state.timers import Timers
from slimebus.messages import NO_VERSION, Batch, Evaluate, Hint, Lease, Message, Read

MAX_REASONS = 256
MAX_REASON_CHARS = 64
MAX_ENDED_REASON_CHARS = 512
"""Of a dead or dropped group, on disk: whoever lists them wants the whole message."""
RECENT_STEPS = 64
RECENT_PUTS = 4096
FILTERED = "groups filtered"
MEAN_OVER = 256
"""Groups whose mean size says how many fill a batch of tokens."""
_encode = msgspec.msgpack.Encoder().encode


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of the source: an id that never changes, its place in the order, its opaque record."""

    id: str
    position: int
    record: bytes


class PromptSource(Protocol):
    """Prompts by position: the same position gives the same prompt, always."""

    fingerprint: str

    def take(self, position: int) -> Prompt | None:
        """The prompt at a position, or None when the source has ended."""

    def find(self, prompt_id: str) -> Prompt | None:
        """The prompt of an id, or None when this source never had it."""


@runtime_checkable
class StatefulSource(PromptSource, Protocol):
    """A source that changes with what is drawn from it and with what became of that. Its prompts are found again in the store only."""

    def restore(self, state: bytes) -> None:
        """Take up the state that `saved` gave."""

    def saved(self) -> bytes | None:
        """The state to keep with what was drawn and told, None when it is as it was. Raises nothing."""

    def tell(self, result: "GroupResult") -> None:
        """What became of a group. Raises nothing."""


@runtime_checkable
class ReportingSource(PromptSource, Protocol):
    """A source that has something to say in the status. skipped: malformed prompts left out, the first ones with place and reason."""

    skipped: list[str]

    def report(self) -> dict[str, Any]:
        """What to show under `source`: names to numbers or text."""


class GroupResult(msgspec.Struct, kw_only=True):
    """What became of an attempt at a prompt. outcome: trained | dropped | dead | requeued (its samples were thrown away).

    rewards: one for each sample, None for those that failed; empty when no samples came. step: that trained it. metadata: the prompt's.
    """

    id: str
    attempt: int
    outcome: str
    reason: str
    rewards: list[float | None] = []
    step: int = -1
    metadata: dict[str, Any] = {}


class State:
    """Everything the broker knows. Changed by the functions of this package only; `flush` turns changes into effects.

    records: None keeps everything in memory.
    """

    def __init__(
        self, rules: Rules, source: PromptSource, run: str, buffer_filter: BufferFilter | None = None, records: Records | None = None
    ) -> None:
        self.rules, self.source, self.buffer_filter, self.records = rules, source, buffer_filter, records
        self.meta = Meta(run=run, fingerprint=source.fingerprint)
        self.groups = Groups()
        self.groups.required = frozenset(rules.required_fields)
        self.clients: dict[str, Client] = {}
        self.steps: dict[int, StepRecord] = {}
        self.pushes: dict[str, PushRecord] = {}
        self.stateful = source if isinstance(source, StatefulSource) else None
        self.source_problem = ""
        self.source_rests_until = 0.0
        self.evaluations: dict[str, Evaluation] = {}
        self.parked_leases: dict[tuple[str, int], Parked[Lease]] = {}
        self.newly_parked: dict[tuple[str, int], float] = {}
        self.parked_batches: dict[int, Parked[Batch]] = {}
        self.parked_evaluations: dict[tuple[str, int], Parked[Evaluate]] = {}
        self.consumers: dict[str, Consumer] = {}
        self.parked_reads: dict[str, Parked[Read]] = {}
        self.last_reads: dict[str, tuple[int, int, int]] = {}
        self.served_changes = 0
        self.hedge_losers: dict[int, None] = {}
        self.timers = Timers()
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self.lease_deadlines: dict[int, float] = {}
        self.lease_since: dict[int, float] = {}
        self.pace = Pace()
        self.now = 0.0
        self.swept: tuple[int, float] | None = None
        self.wait: tuple[int, float] | None = None
        self.recent_puts: dict[int, str] = {}
        self.finished_said = False
        self.had_members = False
        self.bound_hits: dict[str, int] = {}
        self.disk_full = ""
        self.store: dict[str, Any] = {}
        self._saved_meta = b""
        self._effects: list[Effect] = []
        self._changed: set[tuple[Table, str]] = set()

    # --- effects ---

    def reply(self, to: Address, message: Message, bulk: list[Any] | None = None) -> None:
        """Answer a request."""
        self._effects.append(Reply(to, message, bulk or ()))

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """Say something in the log."""
        self._effects.append(Note(text, is_warning))

    def record(self, row: dict[str, Any]) -> None:
        """Add a row to the metrics file."""
        self._effects.append(Record(row))

    def notify(self) -> None:
        """Hint at the newest version and whether the run is over."""
        meta = self.meta
        hint = Hint(lineage=meta.lineage, version=meta.version, publishers=meta.publishers, digest=meta.digest, finished=self.is_finished)
        self._effects.append(Notify(hint))

    def save(self, table: Table, key: str, value: Any) -> None:
        """Write opaque bytes or frames."""
        self._effects.append(Save(table, key, value))

    def delete(self, table: Table, key: str) -> None:
        """Remove a record."""
        self._effects.append(Delete(table, key))

    def read(self, table: Table, key: str) -> bytes | None:
        """A stored record of `ended` or `freed`, as it will be once the effects of this burst are written."""
        for effect in reversed(self._effects):
            if isinstance(effect, Save | Delete) and (effect.table, effect.key) == (table, key):
                return bytes(effect.value) if isinstance(effect, Save) and isinstance(effect.value, bytes) else None
        return None if self.records is None else self.records(table, key)

    def step_record(self, step: int) -> StepRecord | None:
        """The record of a step, of one freed long ago too."""
        if step in self.steps:
            return self.steps[step]
        kept = self.read("freed", str(step)) if step >= 0 else None
        return None if kept is None else msgspec.msgpack.decode(kept, type=StepRecord)

    def changed(self, table: Table, key: str | int) -> None:
        """Have a record written when the event is done."""
        self._changed.add((table, str(key)))

    def flush(self) -> list[Effect]:
        """The effects since the last flush; what was changed is written before anyone is answered."""
        writes: list[Effect] = []
        meta = _encode(self.meta)
        if meta != self._saved_meta:
            self._saved_meta = meta
            writes.append(Save("meta", "meta", meta))
        if self.stateful is not None and (saved := self.stateful.saved()) is not None:
            writes.append(Save("source", "state", saved))
        for table, key in sorted(self._changed):
            record = self._record(table, key)
            writes.append(Delete(table, key) if record is None else Save(table, key, _encode(record)))
        effects = writes + self._effects
        self._effects, self._changed = [], set()
        return effects

    def _record(self, table: Table, key: str) -> Any:
        if table == "groups":
            return self.groups.by_id.get(key)
        if table == "steps":
            return self.steps.get(int(key))
        if table == "evaluations":
            return self.evaluations.get(key)
        if table == "consumers":
            return self.consumers.get(key)
        if table == "pushes":
            return self.pushes.get(key)
        client = self.clients.get(key)
        return None if client is None else ClientRecord(**{f: getattr(client, f) for f in ClientRecord.__struct_fields__})

    # --- counting ---

    def tally(self, counter: dict[str, int], reason: str, by: int = 1) -> None:
        """Add to a counter by reason; reasons from outside are cut, and there are at most 256 of them."""
        reason = _counted(reason, counter)
        counter[reason] = counter.get(reason, 0) + by

    def wasted(self, reason: str, groups: int, tokens: int) -> None:
        """Count samples that were made and will not be trained."""
        reason = _counted(reason, self.meta.waste)
        had = self.meta.waste.get(reason, [0, 0])
        self.meta.waste[reason] = [had[0] + groups, had[1] + tokens]

    # --- moving groups ---

    def move(self, group: Group, phase: Phase, reason: str) -> None:
        """Change a group's state, counted by reason."""
        was, leases = group.phase, (group.lease, group.second.lease if group.second else 0)
        self.groups.move(group, phase)
        group.reason = reason[:MAX_REASON_CHARS]
        self.tally(self.meta.moves, f"{was}>{phase} {reason}" if group.kind == TRAIN else f"eval {was}>{phase} {reason}")
        if was == LEASED:
            for lease in leases:
                self.forget_lease(lease)
        self.changed("groups", group.id)

    def forget_lease(self, lease: int) -> None:
        """A lease has ended; 0 is none."""
        if lease:
            self.timers.cancel(("lease", lease))
            self.lease_deadlines.pop(lease, None)
            self.lease_since.pop(lease, None)

    def requeue(self, group: Group, reason: str) -> None:
        """Have the prompt tried again; samples it had are wasted."""
        if group.phase in (READY, ASSIGNED, COMMITTED):
            self.tell(group, "requeued", reason)
        group.rewards = []
        self._forget_samples(group, reason)
        self.move(group, QUEUED, reason)
        group.lease = group.request = 0
        group.worker, group.step = "", -1

    def drop(self, group: Group, reason: str) -> None:
        """Take the prompt out of the run for a reason."""
        self.end(group, DROPPED, reason)

    def fail(self, group: Group, reason: str) -> None:
        """Count a failed attempt: another try, or dead after `max_attempts`."""
        group.failures += 1
        if group.failures >= self.rules.max_attempts:
            self.end(group, DEAD, reason)
        else:
            self.requeue(group, reason)

    def end(self, group: Group, phase: Phase, reason: str) -> None:
        """Take a group out of play, dropped or dead; its record is kept."""
        self.tell(group, phase, reason)
        self._forget_samples(group, reason)
        if group.partial_frames:
            self.wasted(reason, 0, group.partial_tokens)
            self.forget_partial(group)
        self.move(group, phase, reason)
        self.groups.remove(group)
        group.reason = reason[:MAX_ENDED_REASON_CHARS]
        self.save("ended", group.id, msgspec.msgpack.encode(group))
        self.tally(self.meta.ended, phase)
        if phase == DROPPED:
            self.delete("prompts", group.id)
        else:
            self.note(f"group {group.id} is dead after {group.failures} failed attempts; the last: {group.reason}", is_warning=True)

    def retire(self, group: Group, reason: str) -> None:
        """An evaluation group is done with: scored, given up or cancelled."""
        self.tally(self.meta.moves, f"eval {group.phase}>done {reason}")
        self.forget_lease(group.lease)
        self.groups.remove(group)
        self.changed("groups", group.id)

    def _forget_samples(self, group: Group, reason: str) -> None:
        if group.phase not in (READY, ASSIGNED, COMMITTED):
            return
        self.wasted(reason, 1, group.num_tokens)
        self.forget_payload(group)
        group.num_samples = group.num_tokens = group.num_frames = group.size_bytes = group.num_failed = 0
        group.oldest_version = group.newest_version = NO_VERSION
        group.steps_behind = 0

    def tell(self, group: Group, outcome: str, reason: str, step: int = -1) -> None:
        """Have a stateful source know what became of a group that it gave: each attempt once, and each end."""
        if self.stateful is None or not group.id.startswith("hook/"):
            return
        if group.told_attempt == group.attempt and outcome in ("trained", "requeued"):
            return
        group.told_attempt = group.attempt
        result = GroupResult(
            id=group.id, attempt=group.attempt, outcome=outcome, reason=reason[:MAX_REASON_CHARS], rewards=group.rewards, step=step
        )
        self.stateful.tell(result)
        self.meta.source_ended, self.source_rests_until = False, 0.0  # it may have something now

    def forget_payload(self, group: Group) -> None:
        """Let go of a group's stored samples and fields."""
        self.delete("payloads", group.id)
        for field in group.late:
            self.delete("fields", field_key(group.id, field.name))
        self.groups.depart(group)
        group.lengths, group.fields, group.late = [], [], []

    # --- measuring ---

    def filtered(self) -> None:
        """A finished group was dropped by the dynamic filter, and none was kept since the last one."""
        self.tally(self.meta.counted, FILTERED)
        self.meta.filtered_in_a_row += 1
        if self.meta.filtered_in_a_row == self.rules.max_filtered:
            self.note(f"{self.rules.max_filtered} groups in a row were dropped by the dynamic sampling filter", is_warning=True)

    def measured(self, num_tokens: int) -> None:
        """Take the size of a group into the running mean of the last ones."""
        meta = self.meta
        meta.num_measured = min(meta.num_measured + 1, MEAN_OVER)
        meta.mean_tokens += (num_tokens - meta.mean_tokens) / meta.num_measured

    def remember_put(self, lease: int, result: str) -> None:
        """Keep what became of a put, so that a repeat of it is not counted again; the oldest is forgotten."""
        self.recent_puts[lease] = result
        if len(self.recent_puts) > RECENT_PUTS:
            del self.recent_puts[next(iter(self.recent_puts))]

    def end_wait(self) -> None:
        """No batch waits for groups in flight."""
        if self.wait is not None:
            self.wait = None
            self.timers.cancel(("stale wait",))

    def forget_partial(self, group: Group) -> None:
        """Let go of what a leaving worker had made of a group."""
        self.delete("partials", group.id)
        group.partial_frames = group.partial_tokens = 0
        group.partial_oldest = group.partial_newest = NO_VERSION
        group.partial_steps = 0
        self.changed("groups", group.id)

    # --- questions ---

    def version_of(self, step: int) -> int:
        """The version being trained in `step`: what was said when its groups were chosen, later ones at today's pace."""
        if step in self.steps:
            return self.steps[step].version
        interval, meta = self.rules.publish_interval, self.meta
        return meta.pace_version + step // interval - meta.pace_step // interval

    def steps_behind(self, version: int) -> int:
        """How many steps this timeline had trained when it made a version; versions of one number may differ in it across lineages."""
        step = self.meta.next_step + 1
        while step > self.meta.base_step and self.version_of(step - 1) >= version:
            step -= 1
        return step

    @property
    def next_unassigned(self) -> int:
        """The first step whose groups are not chosen yet."""
        step = self.meta.next_step
        while step in self.steps and not self.steps[step].is_committed:
            step += 1
        return step

    @property
    def num_held(self) -> int:
        """Groups leased, ready or assigned."""
        counts = self.groups.counts
        return counts[TRAIN, LEASED] + counts[TRAIN, READY] + counts[TRAIN, ASSIGNED]

    @property
    def is_evaluating(self) -> bool:
        """True while some evaluation is not done."""
        return any(not e.is_done for e in self.evaluations.values())

    @property
    def is_finished(self) -> bool:
        """True once the trainer has finished and nothing is left to evaluate."""
        return self.meta.finishing and not self.is_evaluating


def _counted(reason: str, counter: Mapping[str, Any]) -> str:
    """The name under which a reason is counted."""
    reason = reason[:MAX_REASON_CHARS] or "no reason given"
    return reason if reason in counter or len(counter) < MAX_REASONS else "other"

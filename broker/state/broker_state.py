"""The state that every decision reads and changes, and how changes become effects."""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from broker.state.effects import Address, Bulk, Effect, Note, Notify, Record, Reply, StepHistory, Table, Write
from broker.state.groups import ASSIGNED, DEAD, DROPPED, LEASED, NO_PARTIAL, READY, TRAIN, WITH_SAMPLES, Group, Groups, Phase, field_key
from broker.state.lease_table import LeaseTable
from broker.state.prompt_source import PromptSource, StatefulSource
from broker.state.records import (
    ROWS,
    BufferFilter,
    ClientRecord,
    ConsumerRecord,
    Evaluation,
    Keyed,
    Meta,
    Pace,
    PushRecord,
    SettingsChange,
    StepRecord,
)
from broker.state.rules import Rules
from broker.state.timers import Key, Timers
from broker.state.waiting import WaitingRequests
from slimebus.bus.envelope import one_line
from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.bus.messages import Batch, Evaluate, Hint, Lease, Message, Read

MAX_REASONS = 256
MAX_REASON_CHARS = 64
MAX_ENDED_REASON_CHARS = 512
"""Of a dead or dropped group, on disk: a list of them shows the whole message."""
RECENT_STEPS = 64
MAX_ENDED = 16_384
"""Dropped groups that are listed, and dead ones; older ones are only counted."""
MAX_PHASES = 64
"""Of one group that are kept in mind."""
FILTERED = "groups filtered"
_encode = msgspec.msgpack.Encoder().encode


class BrokenState(Exception):
    """Tables of the state disagree: a fault of this program."""


class State:
    """Everything the broker knows. Changed by the functions of this package only; `flush` turns changes into effects."""

    def __init__(
        self, rules: Rules, source: PromptSource, run: str, buffer_filter: BufferFilter | None = None, *,
        hints: str = "", max_message_bytes: int = 0, first_id: int = 1,
    ) -> None:  # fmt: skip
        self.rules, self.source, self.buffer_filter = rules, source, buffer_filter
        self.now = 0.0
        self.meta = Meta(run=run, fingerprint=source.fingerprint, next_epoch=first_id, next_lease=first_id)
        self.groups = Groups()
        self.groups.required = frozenset(rules.required_fields)
        self.ended: dict[Phase, dict[str, Group]] = {DROPPED: {}, DEAD: {}}
        self.clients: dict[str, ClientRecord] = {}
        self.steps: dict[int, StepRecord] = {}
        self.evaluations: dict[str, Evaluation] = {}
        self.consumers: dict[str, ConsumerRecord] = {}
        self.pushes: dict[str, PushRecord] = {}
        self.changes: dict[str, SettingsChange] = {}
        self._kept: dict[str, dict[Any, Any]] = {"groups": self.groups.by_id}
        self._kept |= {table: getattr(self, table) for table in ROWS if table not in ("meta", "groups", "ended")}
        self.timers = Timers()
        self.leases = LeaseTable(self.groups, self.timers)
        self.waiting_leases: WaitingRequests[tuple[str, int], Lease] = WaitingRequests("lease", self.timers)
        self.waiting_batches: WaitingRequests[int, Batch] = WaitingRequests("batch", self.timers)
        self.waiting_reads: WaitingRequests[str, Read] = WaitingRequests("read", self.timers)
        self.waiting_evaluations: WaitingRequests[tuple[str, int], Evaluate] = WaitingRequests("evaluate", self.timers)
        self.stateful = source if isinstance(source, StatefulSource) else None
        self.source_problem, self.source_rests_until = "", 0.0
        self.fetched_steps: dict[int, float] = {}
        self.last_reads: dict[str, tuple[int, int, int]] = {}
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self.phase_history: dict[str, list[tuple[str, float]]] = {}
        """Training group in play -> the phases it came into since this process began, and when."""
        self.served_changes = 0
        self.pace = Pace()
        self.stale_removed_at: tuple[str, int, float] | None = None
        self.finish_is_announced, self.finish_is_confirmed = False, True
        self.members_at_restart: set[tuple[str, str]] = set()
        self.had_members = False
        self.num_joined = self.num_trainers_joined = 0
        self.last_trainer, self.trainer_left_at = "", math.inf
        self.bound_hits: Counter[str] = Counter()
        self.differing: dict[str, int] = {}
        """Settings other than the run's, and how many that joined since this process began had them."""
        self.max_message_bytes, self.hints_address, self.store_problem = max_message_bytes, hints, ""
        self.lost_peers: Collection[bytes] = ()
        """Of the processes that a hello of this burst asks to replace, those without a connection."""
        self._saved_meta = b""
        self._effects: list[Effect] = []
        self._has_news = False
        self._changed: dict[tuple[Table, str | int], None] = {}

    def restore(self, records: Mapping[str, Sequence[Any]]) -> None:
        """Take up what was stored. Raises UsageError for that of another run or other data."""
        for meta in records["meta"]:
            self._restore_meta(meta)
        for group in records["groups"]:
            self.groups.add(group)
        for group in sorted(records["ended"], key=lambda group: group.ended):
            self.ended[group.phase][group.id] = group
        for table in self._kept.keys() - {"groups"}:
            for record in sorted(records[table], key=lambda record: getattr(record, "serial", 0)):
                self._kept[table][getattr(record, ROWS[table].key)] = record
        self.fetched_steps = dict.fromkeys(self.steps, self.now)  # whether the trainer has their samples is not known any more
        if self.stateful is not None:
            for kept in records["source"]:
                self.stateful.restore(kept)

    def _restore_meta(self, meta: Meta) -> None:
        new = self.meta
        if meta.run != new.run:
            raise UsageError(f"the store holds run {meta.run!r}, not {new.run!r}; use another run directory")
        if meta.fingerprint != new.fingerprint and meta.cursor:
            what = f"the prompt data changed since this run began: it was {meta.fingerprint}, it is {new.fingerprint}"
            raise UsageError(f"{what}; continue with the same data or start in a new run directory", code="data")
        goes_on = (self.rules.num_steps or 0) > meta.finished_num_steps  # a worker that joins before the trainer is to wait for it
        self.meta = msgspec.structs.replace(
            meta,
            fingerprint=new.fingerprint,
            source_ended=False,
            finishing=meta.finishing and not goes_on,
            next_epoch=max(new.next_epoch, meta.next_epoch),  # a power cut may have taken the last ones that were given
            next_lease=max(new.next_lease, meta.next_lease),
        )

    # --- effects ---

    def reply(self, to: Address, message: Message, bulk: Sequence[Bulk] = ()) -> None:
        """Answer a request."""
        self._effects.append(Reply(to, message, bulk))

    def answer(self, waiting: WaitingRequests[Any, Any], key: Any, message: Message, bulk: Sequence[Bulk] = ()) -> None:
        """Answer a request that waits; nothing when it does not wait any more."""
        if (found := waiting.take_out(key)) is not None:
            self.reply(found.to, message, bulk)

    def note(self, text: str, *, is_warning: bool = False) -> None:
        """Write one line to the log, also where a peer sent line breaks."""
        self._effects.append(Note(one_line(text), is_warning))

    def record(self, row: dict[str, Any]) -> None:
        """Add a row to the metrics file."""
        self._effects.append(Record(row))

    def notify(self) -> None:
        """Hint at the newest version, whether the run is over, and at recalled leases: once a flush, for every process hears each hint."""
        self._has_news = True

    def save(self, table: Table, key: str, value: Any) -> None:
        """Write opaque bytes or frames."""
        self._effects.append(Write(table, key, value))

    def delete(self, table: Table, key: str) -> None:
        """Remove a record."""
        self._effects.append(Write(table, key, None))

    def changed(self, table: Table, key: str | int) -> None:
        """Have a record written when the event is done."""
        self._changed[table, key] = None

    def flush(self) -> list[Effect]:
        """The effects since the last flush; what was changed is written before anyone is answered."""
        writes: list[Effect] = []
        meta = _encode(self.meta)
        if meta != self._saved_meta:
            self._saved_meta = meta
            writes.append(Write("meta", "meta", meta))
        if self.stateful is not None and (saved := self.stateful.saved()) is not None:
            writes.append(Write("source", "state", saved))
        for table, key in self._changed:
            record = self.find_ended(str(key)) if table == "ended" else self._kept[table].get(key)
            writes.append(Write(table, str(key), None if record is None else _encode(record)))
        effects = writes + self._effects
        if self._has_news:
            effects.append(Notify(Hint(**self.meta.newest(), finished=self.is_finished, recalls=self.leases.num_recalls)))
        self._effects, self._changed, self._has_news = [], {}, False
        return effects

    # --- counting ---

    def tally(self, counter: dict[str, int], reason: str, by: int = 1) -> int:
        """Add to a counter by reason, and return its sum; reasons from outside are cut, and there are at most 256 of them."""
        reason = _counted(reason, counter)
        counter[reason] = counter.get(reason, 0) + by
        return counter[reason]

    def count_waste(self, reason: str, groups: int, tokens: int) -> None:
        """Count samples that were made and will not be trained."""
        reason = _counted(reason, self.meta.waste)
        had = self.meta.waste.get(reason, [0, 0])
        self.meta.waste[reason] = [had[0] + groups, had[1] + tokens]

    def busy(self, bound: str, text: str) -> SlimebusError:
        """The error of a bound that is reached, counted under its name."""
        self.bound_hits[bound] += 1
        return SlimebusError(f"{text} ({bound})", code="busy", retryable=True)

    def check_may_wait(self, waiting: WaitingRequests[Any, Any], client: str) -> None:
        """Raise SlimebusError `busy` where one more request of this kind, or of this client, may not wait."""
        if len(waiting) >= self.rules.max_parked:
            raise self.busy("max_parked", f"{len(waiting)} {waiting.name} requests wait already")
        if (count := len(waiting.asked_by(client))) >= self.rules.max_parked_per_client:
            raise self.busy("max_parked_per_client", f"{count} {waiting.name} requests of {client} wait already")

    # --- moving groups ---

    def enter(self, group: Group, origin: str) -> Group:
        """Take in a group in the state it is in, counted by where it comes from."""
        self.groups.add(group)
        self._record_phase(group)
        self.tally(self.meta.moves, origin)
        self.changed("groups", group.id)
        return group

    def move(self, group: Group, phase: Phase, reason: str) -> None:
        """Change a group's state, counted by reason."""
        was = group.phase
        self.groups.move(group, phase, reason[:MAX_REASON_CHARS])
        self._record_phase(group)
        self.tally(self.meta.moves, f"{_kind_prefix(group)}{was}>{phase} {reason}")
        if was == LEASED:
            self.leases.end(group)
        self.changed("groups", group.id)

    def retire(self, group: Group, reason: str) -> None:
        """Let go of a group without a trace but a count: of an evaluation that is done with it, or of a run that begins anew."""
        self.tally(self.meta.moves, f"{_kind_prefix(group)}{group.phase}>done {reason}")
        self.forget_samples(group, reason)
        self.waste_partial(group, reason)
        self.groups.remove(group)
        self.leases.end(group)
        self.changed("groups", group.id)
        self.phase_history.pop(group.id, None)
        if group.kind == TRAIN:
            self.delete("prompts", group.id)

    def _record_phase(self, group: Group) -> None:
        if group.phase in (DROPPED, DEAD):
            self.phase_history.pop(group.id, None)
        elif group.kind == TRAIN and len(life := self.phase_history.setdefault(group.id, [])) < MAX_PHASES:
            life.append((group.phase, self.now))

    def phases_of(self, group: Group) -> str:
        """The phases that a group came into since this process began, and when, in words."""
        return ", ".join(f"{phase} at {at:.3f} s" for phase, at in self.phase_history.get(group.id, [])) or "nothing"

    def record_history(self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> None:
        """Record how the groups of a step, which is committed, came to be trained. metrics: the trainer's."""
        after_s = metrics.get("publish_s", 0.0) + metrics.get("save_s", 0.0)
        lives = {group.id: (group.num_samples, self.phase_history.pop(group.id, [])) for group in groups}
        self._effects.append(StepHistory(step, self.now, metrics.get("train_s", 0.0), after_s, lives))

    def keep_latest(self, table: Table, record: Keyed, most: int) -> None:
        """Keep a record by its key; of more than `most` the oldest is forgotten."""
        records = self._kept[table]
        records[record.key] = record
        self.changed(table, record.key)
        while len(records) > most:
            oldest = next(iter(records))
            del records[oldest]
            self.changed(table, oldest)

    def end(self, group: Group, reason: str) -> None:
        """Take a group that is dropped or dead out of play; its record is kept."""
        self.meta.next_ended += 1
        self.groups.end(group, reason[:MAX_ENDED_REASON_CHARS], self.meta.next_ended)
        self.keep_ended(group)

    def keep_ended(self, group: Group) -> None:
        """List a group that has ended; of more than MAX_ENDED that ended like it the oldest is listed no more, and still counted."""
        self.ended[group.phase][group.id] = group
        self.tally(self.meta.ended, group.phase)
        self.changed("ended", group.id)
        if len(self.ended[group.phase]) > MAX_ENDED:
            self._unlist(next(iter(self.ended[group.phase].values())))
            self.tally(self.meta.counted, f"{group.phase} groups listed no more")

    def forget_ended(self, group: Group) -> None:
        """A group that has ended is in play again, or counts as nothing any more."""
        self.meta.ended[group.phase] -= 1
        self._unlist(group)

    def _unlist(self, group: Group) -> None:
        """The prompt goes too, unless it is in play again."""
        del self.ended[group.phase][group.id]
        self.changed("ended", group.id)
        if group.id not in self.groups.by_id:
            self.delete("prompts", group.id)

    def find_ended(self, group_id: str) -> Group | None:
        """A dropped or dead group that is still listed."""
        return self.ended[DROPPED].get(group_id) or self.ended[DEAD].get(group_id)

    def forget_samples(self, group: Group, reason: str) -> None:
        """Let go of the samples of a group, where it has some; they are wasted."""
        if group.phase not in WITH_SAMPLES:
            return
        self.count_waste(reason, 1, group.num_tokens)
        self.delete_samples(group)

    def delete_samples(self, group: Group) -> None:
        """Remove a group's stored samples and fields."""
        self.delete("payloads", group.id)
        for name in group.late_names:
            self.delete("fields", field_key(group.id, name))
        self.groups.forget_samples(group)

    def make_readable(self, group: Group) -> None:
        """The samples of a group were accepted: consumers find it behind all others."""
        self.groups.index_for_consumers(group, self.meta.next_read_position)
        self.meta.next_read_position += 1

    def waste_partial(self, group: Group, reason: str) -> None:
        """Let go of the partial of a group, where it has one; it is wasted."""
        if group.partial.num_frames:
            self.count_waste(reason, 0, group.partial.num_tokens)
            self.delete_partial(group)

    def delete_partial(self, group: Group) -> None:
        """Remove what a leaving worker had made of a group."""
        self.delete("partials", group.id)
        self.groups.keep_partial(group, NO_PARTIAL)
        self.changed("groups", group.id)

    # --- what always holds ---

    def validate(self) -> None:
        """Raise BrokenState where tables disagree. Between bursts of events they never do; it takes time for each group, so tests ask."""
        for problem in (*self.groups.problems(), *self._problems()):
            raise BrokenState(problem)

    def _problems(self) -> Iterator[str]:
        groups, workers = self.groups, self.groups.by_worker
        if ghosts := sorted(workers.keys() - self.clients.keys()):
            yield f"leases are held by {ghosts}, who are no clients"
        if groups.by_lease.keys() != self.leases.held_since.keys():
            yield f"leases without a time, or times without a lease: {sorted(groups.by_lease.keys() ^ self.leases.held_since.keys())}"
        chosen = {name for record in self.steps.values() if not record.is_committed for name in record.groups}
        if chosen != (assigned := {g.id for g in groups.by_id.values() if g.phase == ASSIGNED}):
            yield f"assigned groups and steps disagree on {sorted(chosen ^ assigned)}"
        if twice := sorted(groups.by_id.keys() & (self.ended[DROPPED].keys() | self.ended[DEAD].keys())):
            yield f"groups are in play and ended: {twice}"
        needed, timers = set(self._needed_timers()), self.timers.keys()
        optional = {("unserved evaluation", key) for key, one in self.evaluations.items() if not one.is_done}
        optional |= {("leases of", worker) for worker in workers}
        if lacking := needed - timers:
            yield f"timers are lacking: {lacking}"
        if leaking := {key for key in timers - needed - optional if key[1] is not None}:
            yield f"timers are left over: {leaking}"

    def _needed_timers(self) -> Iterator[Key]:
        yield from self.leases.needed_timers()
        for table in (self.waiting_leases, self.waiting_batches, self.waiting_reads, self.waiting_evaluations):
            yield from ((table.name, key) for key in table)
        yield from (("client", name) for name in self.clients)

    def set_pace(self, step: int, version: int) -> None:
        """From this step, which trains this version, on, versions follow the publish interval."""
        self.meta.pace_step, self.meta.pace_version = step, version

    # --- questions ---

    def groups_of(self, record: StepRecord, *phases: Phase) -> list[Group]:
        """The groups of a step that it still has and that are in one of these phases."""
        groups = [self.groups.by_id.get(group_id) for group_id in record.groups]
        return [g for g in groups if g is not None and g.step == record.step and g.phase in phases]

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
        """The first step without chosen groups."""
        step = self.meta.next_step
        while step in self.steps and not self.steps[step].is_committed:
            step += 1
        return step

    @property
    def num_in_flight(self) -> int:
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
        return self.is_finishing and not self.is_evaluating

    @property
    def is_finishing(self) -> bool:
        """True once the trainer has finished. A broker that was restarted believes it when a worker or trainer from before speaks, or when
        all of them stay silent and no trainer joins: no process of a run that goes on may leave before its trainer has joined."""
        return self.meta.finishing and self.finish_is_confirmed

    def confirm_finish(self, *, is_certain: bool = True) -> None:
        """What is known of the finish holds; or, after a restart, it is not certain."""
        self.finish_is_confirmed = is_certain


def _kind_prefix(group: Group) -> str:
    return "" if group.kind == TRAIN else "eval "


def _counted(reason: str, counter: Mapping[str, Any]) -> str:
    """The name under which a reason is counted."""
    if reason in counter:
        return reason
    reason = one_line(reason)[:MAX_REASON_CHARS] or "no reason given"
    return reason if reason in counter or len(counter) < MAX_REASONS else "other"

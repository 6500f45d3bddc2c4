"""What must hold after each event, told apart from how the state machine makes it so."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.actor import require

from broker.state.broker_state import State
from broker.state.clients import RECONNECT_S, SILENT_BEATS
from broker.state.effects import Address, Effect, Event, Note, Notify, Reply
from broker.state.groups import ASSIGNED, COMMITTED, LEASED, READY, TRAIN, Group
from broker.state.records import ClientRecord
from broker.state_machine import StateMachine
from broker.suspend_tolerant_clock import LONGEST_TURN_S, MAX_UNREAD_S
from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

DEEP_EVERY = 4
"""Looking at everything is the slow part. What is lost stays lost, so each fourth turn finds it all the same."""
RESTORE_EVERY = 16
EXPIRED = ("leased>queued lease expired", "leased>dead lease expired", "eval leased>queued lease expired")


class Invariants:
    """Watches the broker of one world."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._turns = 0
        self._in_charge = self._durably_in_charge = b""
        self._left: dict[str, str] = {}
        self._had_drawn = 0
        self._freed: set[str] = set()
        self._freed_before: dict[str, set[str]] = {}
        """Lineage of a trainer that began anew -> what was freed before it."""
        self._parked: Counter[Address] = Counter()
        self._heard: dict[int, float] = {}
        self._unread: dict[Address, dict[int, float]] = {}
        """Heartbeats that the broker has not read yet, and when each of the leases that it speaks of was heard of by it."""
        self._held: dict[int, Group] = {}
        self._granted: dict[Address, set[int]] = {}
        self._asked: list[tuple[m.Put, bool]] = []
        self._leased_before: set[int] = set()
        self._diverged = self._begins_anew = False
        self._has_place: list[str] = []
        self._rejected: dict[Address, int] = {}
        self._forks: dict[str, int] = {}
        self._given: dict[tuple[str, int], Any] = {}
        """Epochs and leases that left the broker, and for which process or request: none is given twice, also after a power cut."""

    # --- hooks of the broker process ---

    def started(self) -> None:
        """The broker has read its state back."""
        self._parked.clear()
        self._heard.clear()
        self._unread.clear()
        self._restore_charge(self._machine.state)
        for lineage in self._freed_before.keys() - set(self._machine.state.meta.lineages):  # it never began: its resume is not on the disk
            self._freed |= self._freed_before.pop(lineage)
        self._note_freed(self._machine.state)
        self.deep(self._machine)
        require(_durable(self.world.broker.restored().state) == _durable(self._machine.state), "two restores of one disk differ")

    def _restore_charge(self, state: State) -> None:
        """A resume that was decided on is there with all that it did, or the trainer before is in charge still."""
        kept, known = state.meta.trainer[1].encode(), {self._in_charge, self._durably_in_charge}
        require(kept in known or self.world.account.lost_suffix, f"{kept!r} is in charge after a restart, not one of {known}")
        self._in_charge = self._durably_in_charge = kept

    def arrived(self, event: Event) -> None:
        """A request has reached the broker, which may read it later."""
        state, beat = self._machine.state, event.message
        client, held = state.clients.get(event.sender), state.groups.by_worker.get(event.sender)
        if not isinstance(beat, m.Heartbeat) or client is None or held is None or client.epoch != event.epoch:
            return
        agrees = (beat.num_leases, beat.lease_sum) == (len(held.groups), sum(held.groups) % m.LEASE_SUM_MODULUS)
        spoken_of = held.groups.keys() & set(beat.leases or ()) if not agrees else held.groups.keys()
        self._unread[event.to] = dict.fromkeys(spoken_of, max(self.world.now, self.world.broker.stopped_until))

    def beaten(self, to: Address, reply: m.Message | None) -> None:
        """A heartbeat is answered. What was read before it may have changed what the broker counts: then it asks for the list."""
        heard = self._unread.pop(to, {})
        if isinstance(reply, m.HeartbeatReply) and not reply.list_leases:
            self._heard.update(heard)

    def before_tick(self, machine: StateMachine) -> None:
        self._held = dict(machine.state.groups.by_lease)

    def ticked(self, machine: StateMachine, effects: list[Effect]) -> None:
        """Time has done its work: who was heard, by the true time, keeps what it holds. Each jump of a clock may cost one long turn."""
        for lease, group in self._held.items():
            if lease not in machine.state.groups.by_lease and group.reason == "lease expired":
                silence_s = self.world.now - self._heard.get(lease, -1e9)
                spent = machine.state.rules.lease_s
                jumps = sum(at >= self._heard.get(lease, -1e9) for at in self.world.clock_jumps)  # each may cost one long turn
                require(
                    silence_s >= spent - max(2, 1 + jumps) * LONGEST_TURN_S,
                    f"lease {lease} of {group.id} expired {silence_s:.1f} s after a heartbeat for it",
                )
        self._answered([], machine, effects)

    def before(self, machine: StateMachine, events: list[Event]) -> None:
        self._asked, self._diverged, self._begins_anew = [], False, False
        self._had_drawn = machine.state.meta.cursor
        self._leased_before = set(machine.state.groups.by_lease)  # by the clock an earlier turn may be the same moment
        for event in events:
            self._note_divergence(machine.state, event)
        if len(events) == 1 and isinstance(put := events[0].message, m.Put):
            self._asked = [(put, _holds(machine.state, events[0].sender, put))]
        self._has_place = self._living(machine.state, events[0]) if len(events) == 1 and isinstance(events[0].message, m.Hello) else []

    def _note_divergence(self, state: State, event: Event) -> None:
        """A trainer goes on from steps that the broker was told to forget by another one: it warns, and their prompts may come again."""
        if not isinstance(event.message, m.Resume) or event.message.lineage in state.meta.lineages:
            return
        trained: dict[int, tuple[str, ...]] = getattr(self.world.processes.get(event.to.peer), "trained", {})
        fork = self._note_fork(state, event.message)
        unknown = [step for step in trained if step >= fork or not _has_trained(state, step, trained[step])]
        self.world.account.may_repeat.update(group for step in unknown for group in trained[step])
        self._diverged |= any(step >= fork or step not in state.steps for step in unknown)  # other groups under one step it cannot see
        self._begins_anew |= fork < state.meta.oldest_kept_step

    def _note_fork(self, state: State, resume: m.Resume) -> int:
        """The step behind which no other trainer went back since the lineage began that this one goes on with."""
        lineages = state.meta.lineages
        since = lineages[lineages.index(resume.parent) + 1 :] if resume.parent in lineages else []
        self._forks[resume.lineage] = min([resume.step, *(self._forks[lineage] for lineage in since)])
        return self._forks[resume.lineage]

    def applied(self, machine: StateMachine, events: list[Event], effects: list[Effect]) -> None:
        """Requests were decided on."""
        self._answered(events, machine, effects)
        replies = {e.to: e.message for e in effects if isinstance(e, Reply)}
        for put, had_lease in self._asked:
            result = getattr(replies.get(events[0].to), "result", "")
            require(had_lease or result != "accepted", f"a put of {put.group} without its lease was accepted")
        for event in events:
            if isinstance(event.message, m.Heartbeat):
                self.beaten(event.to, replies.get(event.to))
            if isinstance(event.message, m.Reject):
                self._rejected[event.to] = event.message.step
                self._note_rejected(event.to.peer, event.message.step)
            if isinstance(event.message, m.Resume) and isinstance(replies.get(event.to), m.Ok):
                self._in_charge = event.to.peer
                self._note_skipped(machine.state)
                if self._begins_anew:  # what was freed is to be sampled again: from here on it counts as lost
                    self._freed_before[event.message.lineage] = self._freed
                    self._freed, self._left = set(), {}
        if self._diverged:
            is_refused = all(isinstance(replies.get(e.to), m.Error) for e in events if isinstance(e.message, m.Resume))
            is_told = any(isinstance(effect, Note) and effect.is_warning for effect in effects)
            require(is_refused or is_told, "a trainer goes on from steps that the broker has not, and nobody is told")
        if len(events) == 1:
            self._check_trainer(machine, events[0], replies.get(events[0].to))
            if isinstance(hello := events[0].message, m.Hello):
                self._check_place(machine.state, events[0].sender, hello, replies[events[0].to])
        for message in replies.values():
            if isinstance(message, m.BatchReply) and message.groups:
                self._check_bound(message)
            elif isinstance(message, m.LeaseReply) and message.groups:
                self._check_grant(machine.state, message)

    def _note_skipped(self, state: State) -> None:
        """A broker that lost all it knew skips as many prompts as the trainer says it has trained; docs/protocol.md, `resume`."""
        if self._had_drawn == 0 and self.world.account.lost_suffix:
            skipped = {self.world.scenario.source.id_at(position) for position in range(state.meta.cursor)}
            self._freed |= skipped - state.groups.by_id.keys()

    def _living(self, state: State, event: Event) -> list[str]:
        """Who has the place that a hello asks for, is connected and was heard."""
        hello, silent_s, now = event.message, SILENT_BEATS * state.rules.heartbeat_s, self.world.broker.broker_clock.now
        assert isinstance(hello, m.Hello)
        known = state.clients.get(event.sender)
        if known is not None and hello.instance in {c.instance for c in (known, *known.successors)}:
            return []
        others = [c for c in state.clients.values() if c.name == event.sender or c.role == hello.role == "trainer"]
        others = [c for c in others if c.role == hello.role and not c.is_fenced and now - c.heard_at <= silent_s]
        return [c.instance for c in others if c.peer == c.instance.encode() and self.world.is_connected(c.peer)]

    def _check_place(self, state: State, name: str, hello: m.Hello, reply: m.Message) -> None:
        """A living process keeps its place, and one whose connection is gone keeps nobody out once the broker has run for a while."""
        if isinstance(reply, m.Welcome):
            require(hello.take_over or not self._has_place, f"{hello.instance} is let in beside {self._has_place}")
        elif (
            isinstance(reply, m.Error)
            and reply.code in ("name_in_use", "name_in_doubt")
            and self.world.broker.broker_clock.now > RECONNECT_S + state.rules.heartbeat_s
        ):
            others = [c for c in state.clients.values() if c.name == name or c.role == hello.role == "trainer"]
            is_kept_out = any(self.world.is_connected(c.peer) for c in others if c.instance != hello.instance)
            require(is_kept_out, f"a process that is gone keeps {hello.instance} out: {reply.text}")

    def committed(self, machine: StateMachine) -> None:
        """A turn is on the disk, and nobody is answered yet."""
        self._turns += 1
        self._durably_in_charge = self._in_charge
        self._note_freed(machine.state)
        if self._turns % DEEP_EVERY == 0:
            self.deep(machine)
        if self._turns % RESTORE_EVERY == 0:
            live, stored = _durable(machine.state), _durable(self.world.broker.restored().state)
            for name in live:
                require(live[name] == stored[name], f"{name} on disk is not what the broker holds: {_difference(live[name], stored[name])}")

    def _note_freed(self, state: State) -> None:
        left = {name: group.phase for name, group in state.groups.by_id.items() if group.kind == TRAIN}
        self._freed |= {name for name, phase in self._left.items() if phase == COMMITTED and name not in left}
        self._left = left

    @property
    def _machine(self) -> StateMachine:
        machine = self.world.broker.machine
        assert machine is not None
        return machine

    # --- answers ---

    def _answered(self, events: list[Event], machine: StateMachine, effects: list[Effect]) -> None:
        """Each request is answered once or parked; what was parked is answered when it no longer is."""
        self._check_finish(effects)
        state = machine.state
        parked = Counter(waiting.to for table in _parked(state) for waiting in table.values())
        replies = Counter(e.to for e in effects if isinstance(e, Reply))
        asked = Counter(event.to for event in events)
        if not (events or replies or parked != self._parked):
            return
        for event in events:
            is_waiting = replies[event.to] + parked[event.to] > 0 or self._is_gone(state, event.to)
            require(is_waiting, f"{event.sender}'s {type(event.message).__name__} is neither answered nor parked")
        for to, count in replies.items():
            require(count <= asked[to] + self._parked[to], f"{to} is answered {count} times")
        for to in self._parked:
            if not parked[to] and not replies[to]:
                require(self._is_gone(state, to), f"the parked request {to} is forgotten without an answer")
        self._parked = parked

    def _check_finish(self, effects: list[Effect]) -> None:
        """Nobody is sent home before a trainer has trained the last step that the run has by now."""
        told = [e.message if isinstance(e, Reply) else e.hint for e in effects if isinstance(e, Reply | Notify)]
        steps, trained = self.world.rules.num_steps or 0, self.world.account.finished_steps
        if any(getattr(message, "finished", False) for message in told):
            require(trained is not None and trained >= steps, f"{trained} of {steps} steps are trained, and the broker says it is finished")

    def _is_gone(self, state: State, to: Address) -> bool:
        """True when nobody is there to be answered: dead, gone from the broker, or replaced."""
        process = self.world.processes.get(to.peer)
        client = None if process is None else state.clients.get(process.name)
        return process is None or client is None or client.instance != process.instance

    def _check_trainer(self, machine: StateMachine, event: Event, reply: m.Message | None) -> None:
        """Only the trainer that resumed last is served."""
        trains = isinstance(event.message, m.Resume | m.Publish | m.Batch | m.Fetch | m.Reject | m.Commit | m.Finish)
        if not trains or reply is None or isinstance(reply, m.Error):
            return
        is_alone = event.to.peer == self._in_charge or self.world.account.lost_suffix
        require(is_alone, f"{event.to.peer!r} is served as trainer beside {self._in_charge!r}")

    def _check_bound(self, reply: m.BatchReply) -> None:
        """The bound in force holds for every group handed out."""
        bound = self.world.bound_of(reply)
        for group in reply.groups:
            lag = reply.version - group.oldest_version if group.oldest_version != m.NO_VERSION else 0
            require(lag <= bound, f"step {reply.step}: {group.group} is {lag} versions old, bound {bound}")

    def welcomed(self, to: Address, reply: m.Welcome) -> None:
        """An epoch leaves the broker."""
        first = self._given.setdefault(("epoch", reply.epoch), to.peer)
        require(first == to.peer, f"epoch {reply.epoch} is given to {first!r} and to {to.peer!r}")

    def granted(self, machine: StateMachine, to: Address, reply: m.LeaseReply) -> None:
        """Leases leave the broker: the same request has the same ones."""
        leases, before = {group.lease for group in reply.groups}, self._granted.get(to, set())
        is_same = not before or leases <= before or not before & machine.state.groups.by_lease.keys()
        require(is_same or self.world.account.lost_suffix, f"{to} was granted {before}, now {leases}")
        self._granted[to] = leases
        for lease in leases:
            first = self._given.setdefault(("lease", lease), to)
            require(first == to, f"lease {lease} is granted to {first} and to {to}")

    def _check_grant(self, state: State, reply: m.LeaseReply) -> None:
        for leased in reply.groups:
            group = state.groups.by_lease.get(leased.lease)
            if group is None or group.kind != TRAIN or not group.lease.lineage or leased.lease in self._leased_before:
                continue
            self._check_pace(state, group)

    def _check_pace(self, state: State, group: Group) -> None:
        """A group is let in only if it is still fresh when its turn comes: floor(N / B) <= w + eta, N counted from the first free step."""
        ahead = sum(g.kind == TRAIN and g.phase in (LEASED, READY) and g.lease.id < group.lease.id for g in state.groups.by_id.values())
        chosen = [step for step, record in state.steps.items() if not record.is_committed]
        step = max([state.meta.next_step - 1, *chosen]) + 1 + ahead // (state.rules.over_sampling or state.rules.batch_size)
        lag = self.world.version_of(step) - group.lease.version
        require(lag <= state.rules.max_staleness, f"{group.id} of version {group.lease.version} is let in for step {step}")

    def _note_rejected(self, peer: bytes, first: int) -> None:
        """The batches from this step on are chosen anew."""
        for key in [key for key in self.world.handed_out if key[0] == peer and key[1] >= first]:
            del self.world.handed_out[key]

    def acknowledged(self, to: Address) -> None:
        """A request is answered with Ok. What was answered before a reject of the same burst is not the choice that follows it."""
        if to in self._rejected:
            self._note_rejected(to.peer, self._rejected.pop(to))

    def handed_out(self, to: Address, reply: m.BatchReply) -> None:
        """A batch leaves the broker: the same step has the same groups for the same trainer, each once.

        By trainer and not by the lineage in charge: an answer may go out to a trainer that another one replaced later in the same burst.
        """
        names = [g.group for g in reply.groups]
        require(len(set(names)) == len(names), f"step {reply.step} has a group twice: {names}")
        key = (to.peer, reply.step)
        known = self.world.handed_out.setdefault(key, names)
        require(known == names or self.world.account.lost_suffix, f"step {reply.step} was {known}, now it is {names}")
        self.world.handed_out[key] = names

    # --- the whole state ---

    def deep(self, machine: StateMachine) -> None:
        """Every prompt is in one place, and nothing is kept that nobody needs."""
        state = machine.state
        self._check_prompts(state)
        self._check_records(state)
        state.validate()
        self._check_bounds(state)
        machine.status(self.world.broker.broker_clock.now)

    def _check_prompts(self, state: State) -> None:
        source, meta = self.world.scenario.source, state.meta
        in_play = {name for name, group in state.groups.by_id.items() if group.kind == TRAIN}
        ended = set(self.world.broker.disk.tables["ended"])
        drawn = {source.id_at(position) for position in range(meta.cursor)}
        found = in_play | ended
        require(found <= drawn, f"invented {sorted(found - drawn)}")
        require(drawn <= found | self._freed, f"lost {sorted(drawn - found - self._freed)}")
        require(not in_play & ended, f"in two places: {sorted(in_play & ended)}")

    def _check_records(self, state: State) -> None:
        tables = self.world.broker.disk.tables
        groups = state.groups.by_id
        require(
            tables["groups"].keys() == groups.keys(),
            f"the store does not hold the groups in play: {tables['groups'].keys() ^ groups.keys()}",
        )
        dead = {key for key, value in tables["ended"].items() if b"dead" in value}
        prompts = {name for name, group in groups.items() if group.kind == TRAIN} | dead
        require(tables["prompts"].keys() == prompts, f"prompt records that leak or lack: {sorted(tables['prompts'].keys() ^ prompts)}")
        payloads = {name for name, group in groups.items() if group.phase in (READY, ASSIGNED, COMMITTED)}
        partials = {name for name, group in groups.items() if group.partial.num_frames}
        require(tables["partials"].keys() == partials, f"partials that leak or lack: {sorted(tables['partials'].keys() ^ partials)}")
        require(tables["payloads"].keys() == payloads, f"payloads that leak or lack: {sorted(tables['payloads'].keys() ^ payloads)}")

    def _check_bounds(self, state: State) -> None:
        rules = state.rules
        bound = rules.capacity + 2 * max(self.world.batch_sizes) * (rules.num_steps or 100)
        require(state.num_in_flight <= bound, f"{state.num_in_flight} groups are in flight, bound {bound}")
        kinds = ("unconfirmed lease", "leases of", "recalled lease")
        first = min((state.timers.deadline(key) for key in set(state.timers.keys()) if key[0] in kinds), default=float("inf"))
        overdue_s = self.world.broker.broker_clock.now - first
        require(overdue_s <= LONGEST_TURN_S + MAX_UNREAD_S, f"a lease outlives its deadline by {overdue_s:.1f} s")
        waiting = sum(len(table) for table in _parked(state))
        require(waiting <= rules.max_parked + len(state.waiting_batches), f"{waiting} requests are parked")


_tables: list[str] = []
"""Names of a state's tables of parked requests, once they are known: they are asked for after every event."""


def _parked(state: State) -> list[Any]:
    if not _tables:
        _tables.extend(name for name in vars(state) if name.startswith("waiting_"))
    return [getattr(state, name) for name in _tables]


def _holds(state: State, name: str, put: m.Put) -> bool:
    group = state.groups.by_id.get(put.group)
    if group is None or group.phase != LEASED:
        return False
    return (group.lease.worker, group.lease.id) == (name, put.lease)


def _has_trained(state: State, step: int, groups: tuple[str, ...]) -> bool:
    """True when the broker has these groups on record for a step, or has freed what a step of its past had."""
    record = state.steps.get(step)
    return step < state.meta.next_step if record is None else set(record.groups) == set(groups)


def _durable(state: State) -> dict[str, dict[Any, Any]]:
    """What a restart must give back."""
    return {
        "meta": {**msgspec.structs.asdict(state.meta), "source_ended": False, "next_epoch": 0, "next_lease": 0},  # a start moves them on
        "groups": state.groups.by_id,
        "steps": state.steps,
        "evaluations": state.evaluations,
        "clients": {name: _kept(client) for name, client in state.clients.items() if client.role != "client"},
    }


def _kept(client: ClientRecord) -> list[Any]:
    """What a restart must give back of a client, and of those that wait for its place."""
    kept = ClientRecord.__struct_fields__[: ClientRecord.__struct_fields__.index("settings")]
    return [[_kept(one) for one in client.successors] if field == "successors" else getattr(client, field) for field in kept]


def _difference(live: dict[Any, Any], stored: dict[Any, Any]) -> str:
    wrong = [key for key in {**live, **stored} if live.get(key) != stored.get(key)]
    return "; ".join(f"{key}: {live.get(key)!r} became {stored.get(key)!r}" for key in wrong[:3])

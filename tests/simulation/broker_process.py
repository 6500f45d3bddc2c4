"""The simulated broker process: the real state machine in a shell like broker/request_loop.py, which may end at any point of a turn.

inbox --burst--> StateMachine --effects--> [decided] commit [committed] replies, one by one [answering]
"""

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from simulation.actor import RUN
from simulation.disk import Disk

from broker.request_loop import RESTORED_TABLES, RETRY_S
from broker.simulate.timeline import Timeline
from broker.state.effects import Bulk, Effect, Event, Inline, Notify, Reply, StoredPayload, StoredPrompt, Write
from broker.state_machine import StateMachine
from broker.store import Damaged, StoreError
from broker.suspend_tolerant_clock import SuspendTolerantClock
from slimebus.bus import messages as m

if TYPE_CHECKING:
    from simulation.world import World

CrashPoint = Literal["decided", "committing", "committed", "answering"]
CRASH_POINTS: tuple[CrashPoint, ...] = ("decided", "committing", "committed", "answering")

BURST = 4
"""Small, so that much waits unread while the broker is at work."""
MAX_IDLE_S = 0.5


class MachineClock:
    """The clocks of one machine (broker.suspend_tolerant_clock.Clock), both of which a fault may move."""

    def __init__(self, timeline: Timeline, *, monotonic_ahead_s: float = 0.0, wall_ahead_s: float = 0.0) -> None:
        self.timeline, self.monotonic_ahead_s, self.wall_ahead_s = timeline, monotonic_ahead_s, wall_ahead_s

    def monotonic(self) -> float:
        """Seconds since some moment of this machine."""
        return self.timeline.now + self.monotonic_ahead_s

    def time(self) -> float:
        """What this machine believes to be the time of day."""
        return self.timeline.now + self.wall_ahead_s


class Crashed(Exception):
    """The broker process ends here."""


class Unwritten(NamedTuple):
    """A burst that is decided and that the full disk has not taken, and when it is tried again, by the true time."""

    writes: list[Write]
    effects: Sequence[Effect]
    problem: StoreError
    retry_at: float


class BrokerProcess:
    """The broker and the machine it runs on. Its disk outlives it; `machine` is None while it is down."""

    def __init__(self, world: "World") -> None:
        self.world, self.disk = world, Disk(world.scenario.durability)
        self.machine: StateMachine | None = None
        self.unwritten: Unwritten | None = None
        self.inbox: deque[Event] = deque()
        self.crash_at: CrashPoint | None = None
        self.started_at = self.stopped_until = self._wake_at = self.wall_ahead_s = 0.0
        self.is_over = False
        self.num_boots = 0

    # --- life ---

    def start(self) -> None:
        """Read the state back from the disk, with whatever the clocks of the machine say."""
        rng, world = self.world.random, self.world
        monotonic_s = rng.choice([0.0, rng.uniform(-1e6, 1e6)])
        self.clock = MachineClock(world.timeline, monotonic_ahead_s=monotonic_s, wall_ahead_s=1e6 + self.wall_ahead_s)
        self.broker_clock = SuspendTolerantClock(self.clock)
        self.machine = self.restored()
        self.num_boots += 1
        self.is_over = False
        self.started_at = self._wake_at = world.now
        world.trace(f"broker starts ({self.num_boots})")
        world.invariants.started()
        for process in list(world.processes.values()) if self.num_boots > 1 else ():
            process.reconnect()

    def restored(self) -> StateMachine:
        """A machine made from what is on the disk."""
        machine = StateMachine(self.world.rules, self.world.scenario.source, run=RUN, first_id=int(self.clock.time() * 1000))
        machine.restore([(t, k, v) for t in RESTORED_TABLES for k, v in self.disk.scan(t)], self.broker_clock.now)
        return machine

    def crash(self, *, down_s: float, torn: int = 0) -> None:
        """kill -9, or with `torn` a power cut that takes the last transactions along. It is restarted `down_s` later.

        One that has ended is there no more.
        """
        if self.machine is None or self.is_over:
            return
        self.machine, self.crash_at, self.unwritten = None, None, None
        self.inbox.clear()
        self.world.trace(f"broker is killed, {torn} transactions are torn off")
        if torn:
            self.world.account.tore_off(self.disk.tear_off(torn))
        self.world.timeline.later(down_s, self.start)

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP: what arrives waits in its sockets."""
        self.stopped_until = max(self.stopped_until, self.world.now + seconds)

    def deliver(self, event: Event) -> None:
        """A request arrives."""
        if self.machine is None:
            return
        self.inbox.append(event)
        self.world.invariants.arrived(event)
        self._wake_at = min(self._wake_at, self.world.now + self.world.random.choice([0.0, 0.001, 0.05]))

    def wake_at(self) -> float:
        """When the next turn is, by the true time."""
        return float("inf") if self.machine is None or self.is_over else max(self._wake_at, self.stopped_until)

    # --- a turn ---

    def turn(self) -> int:
        """One burst: receive, decide, commit, answer. Returns how many requests it had: long waits have thousands of turns without any."""
        assert self.machine is not None
        events = [self.inbox.popleft() for _ in range(min(BURST, len(self.inbox)))]
        try:
            if self.unwritten is not None:
                self._turn_blocked(self.machine, self.unwritten, events)
            else:
                self._turn(self.machine, events, self.broker_clock.advance())
        except Crashed:
            self.crash(down_s=self.world.random.expovariate(1.0))
        else:
            self._sleep(self.machine)
        return len(events)

    def _turn(self, machine: StateMachine, events: list[Event], now: float) -> None:
        watch = self.world.invariants
        effects: list[Effect] = []
        problem = self.disk.refusal(0)
        events = self._admitted(events, problem)
        for part in self._parts(events) or [[]]:
            watch.before(machine, part)
            lost = {peer for peer in machine.conflicting_peers(part) if not self.world.is_connected(peer)}
            decided = machine.apply(part, now, store_problem=problem, lost_peers=lost)
            watch.applied(machine, part, decided)
            effects += decided
        watch.before_tick(machine)
        late = machine.tick(now, self.broker_clock.heard_until(all_heard=not self.inbox))
        watch.ticked(machine, late)
        effects += late
        self._perform(machine, effects)

    def _parts(self, events: list[Event]) -> list[list[Event]]:
        """A whole burst at once, or each event by itself, which shows more precisely what it did."""
        if len(events) > 1 and self.world.random.random() < 0.5:
            return [events]
        return [[event] for event in events]

    def _perform(self, machine: StateMachine, effects: Sequence[Effect]) -> None:
        if not effects:  # nothing happened: there is nothing to look at, and long waits have thousands of such turns
            return
        writes: dict[tuple[str, str], Write] = {}
        for effect in effects:
            if isinstance(effect, Write):
                writes[effect.table, effect.key] = effect
        if writes:
            self._may_crash("decided")
            try:
                self._commit(list(writes.values()))
            except StoreError as full:
                self.world.trace("the full disk does not take what the broker has decided")
                self.unwritten = Unwritten(list(writes.values()), effects, full, self.world.now + RETRY_S)
                return
            self._may_crash("committed")
        self._say(machine, effects)

    def _say(self, machine: StateMachine, effects: Sequence[Effect]) -> None:
        self.world.invariants.committed(machine)
        self._answer(machine, [e for e in effects if isinstance(e, Reply)])
        for effect in effects:
            if isinstance(effect, Notify):
                self.world.hint(effect.hint)

    # --- a disk that takes no more ---

    def _admitted(self, events: list[Event], full: str) -> list[Event]:
        """Samples for which there is no room are refused."""
        if not full:
            return events
        for event in events:
            if event.bulk:
                self.world.answer(event.to, m.Error(code="disk_full", text=full, retryable=True), [])
        return [event for event in events if not event.bulk]

    def _turn_blocked(self, machine: StateMachine, burst: Unwritten, events: list[Event]) -> None:
        """Nothing is decided or told, and no time counts, until what was decided is written."""
        for event in events:
            self.world.answer(event.to, m.Error(code=burst.problem.code, text=burst.problem.text, retryable=True), [])
        if self.world.now < burst.retry_at:
            return
        try:
            self._commit(burst.writes)
        except StoreError:
            self.unwritten = burst._replace(retry_at=self.world.now + RETRY_S)
            return
        self.unwritten = None
        self._say(machine, burst.effects)

    def _commit(self, writes: list[Write]) -> None:
        if self.crash_at == "committing" and self.world.random.random() < 0.5:
            raise Crashed  # nobody was answered: the transaction may be there or not
        self.disk.commit(writes)
        self._may_crash("committing")

    def _answer(self, machine: StateMachine, replies: list[Reply]) -> None:
        last = self.world.random.randrange(len(replies) + 1) if self.crash_at == "answering" else -1
        for i, reply in enumerate(replies):
            if i == last:
                self._may_crash("answering")
            if isinstance(reply.message, m.BatchReply) and reply.message.groups:
                self.world.invariants.handed_out(reply.to, reply.message)
            elif isinstance(reply.message, m.LeaseReply):
                self.world.invariants.granted(machine, reply.to, reply.message)
            elif isinstance(reply.message, m.Welcome):
                self.world.invariants.welcomed(reply.to, reply.message)
            elif isinstance(reply.message, m.Ok):
                self.world.invariants.acknowledged(reply.to)
            try:
                bulk = [frame for part in reply.bulk for frame in self._frames(part)]
            except Damaged as gone:
                self._perform(machine, machine.recover_record(gone.table, gone.key, self.broker_clock.now))
                self.world.answer(reply.to, m.Error(code=gone.code, text=gone.text, retryable=gone.retryable), [])
            else:
                self.world.answer(reply.to, reply.message, bulk)
        self._may_crash("answering")

    def _frames(self, part: Bulk) -> Sequence[Any]:
        match part:
            case Inline(value):
                return [value]
            case StoredPrompt(group):
                return [self._stored("prompts", group)]
            case StoredPayload(group, table=table):
                return list(self._stored(table, group))
        return [b"a held-out prompt"]

    def _stored(self, table: str, key: str) -> Any:
        value = self.disk.tables[table].get(key)
        if value is None:
            raise Damaged(table, key, f"{table} of group {key} are gone", code="gone")
        return value

    def _may_crash(self, point: CrashPoint) -> None:
        if self.crash_at == point:
            raise Crashed

    def _sleep(self, machine: StateMachine) -> None:
        if self.inbox:
            self._wake_at = self.world.now
            return
        self.is_over = machine.is_over and self.unwritten is None
        deadline = machine.next_deadline()
        idle_s = MAX_IDLE_S if deadline is None else min(MAX_IDLE_S, max(0.001, deadline - self.broker_clock.now))
        self._wake_at = self.world.now + idle_s

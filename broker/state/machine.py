"""The door of the state machine: a burst of events in, their effects out.

The caller writes every Save and Delete before it sends any Reply or Notify, and calls `tick` when `next_deadline` has come.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from broker.state import (
    batches,
    choice,
    clients,
    consumers,
    damage,
    edits,
    evaluation,
    leases,
    pushes,
    settings,
    status,
    timeline,
    watchdog,
)
from broker.state.buffer_filter import BufferFilter
from broker.state.effects import Effect, Event, Inline
from broker.state.groups import LEASED, Group
from broker.state.records import ROWS, Client, ClientRecord, Consumer, Evaluation, Meta, PushRecord, Records, StepRecord
from broker.state.rules import Rules
from broker.state.table import PromptSource, State
from slimebus import messages as m
from slimebus.envelope import error_reply
from slimebus.errors import ProtocolError, SlimebusError, UsageError

Row = tuple[str, str, bytes]


class Machine:
    """The broker's decisions. Deterministic: the same rows, events and times give the same effects.

    `buffer_filter` chooses the groups of batches; None: first in, first out.
    `first_id`: where epochs and leases begin in a new run; a number that no earlier broker of the same run has reached.
    `records`: reads stored records, so that old ones need not be in memory; None keeps them there.
    """

    def __init__(
        self,
        rules: Rules,
        source: PromptSource,
        *,
        run: str,
        hints: str = "",
        max_message_bytes: int = 0,
        first_id: int = 1,
        buffer_filter: BufferFilter | None = None,
        records: Records | None = None,
    ) -> None:
        self.state = State(rules, source, run, buffer_filter, records)
        self.state.meta.next_epoch = self.state.meta.next_lease = first_id
        self.hints, self.max_message_bytes = hints, max_message_bytes
        self.outside: Callable[[], dict[str, Any]] = dict

    def restore(self, rows: Iterable[Row], now: float) -> None:
        """Take up the stored state. Leases and clients get a full deadline from `now`. Raises UsageError for other data."""
        state = self.state
        pushed = []
        for table, _, value in rows:
            match msgspec.msgpack.decode(value, type=ROWS[table]) if table in ROWS else value:
                case Group() as group:
                    state.groups.add(group)
                case StepRecord() as record:
                    state.steps[record.step] = record
                case Evaluation() as evaluated:
                    state.evaluations[evaluated.key] = evaluated
                case Consumer() as consumer:
                    state.consumers[consumer.name] = consumer
                case ClientRecord() as client:
                    state.clients[client.name] = Client(**msgspec.structs.asdict(client))
                case PushRecord() as push:
                    pushed.append(push)
                case Meta() as meta:
                    self._restore_meta(meta)
                case bytes() as kept if table == "source" and state.stateful is not None:
                    state.stateful.restore(kept)
        pushes.restore(state, pushed)
        settings.restore(state)
        self._restart_deadlines(now)
        evaluation.cancel_impossible(state)
        watchdog.restored(state, now)

    def _restore_meta(self, meta: Meta) -> None:
        state = self.state
        if meta.run != state.meta.run:
            raise UsageError(f"the store holds run {meta.run!r}, not {state.meta.run!r}; use another run directory")
        if meta.fingerprint != state.meta.fingerprint and meta.cursor:
            raise UsageError(
                f"the prompt data changed since this run began: it was {meta.fingerprint}, it is {state.meta.fingerprint}; "
                "continue with the same data or start in a new run directory",
                code="data",
            )
        meta.fingerprint, meta.source_ended = state.meta.fingerprint, False
        state.meta = meta

    def _restart_deadlines(self, now: float) -> None:
        state = self.state
        state.had_members = bool(state.clients)
        for client in state.clients.values():
            clients.heard(state, client, now)
        for lease, group in state.groups.by_lease.items():
            assert group.phase == LEASED
            state.lease_deadlines[lease] = now + state.rules.lease_s
            state.lease_since[lease] = now
            state.timers.set(("lease", lease), now + state.rules.lease_s)
        if state.meta.finishing:
            state.timers.set(("finish",), now + state.rules.client_timeout_s)

    def apply(self, events: Sequence[Event], now: float) -> list[Effect]:
        """Decide on a burst of requests. One that cannot be done changes nothing and is answered with its error.

        Whoever waits is looked at once a burst: what the last request changed is what counts.
        """
        self.state.now = now
        for event in events:
            try:
                self._handle(event, now)
            except SlimebusError as problem:
                self.state.reply(event.to, error_reply(problem))
        self._settle(now)
        watchdog.look(self.state, now)
        return self.state.flush()

    def expel(self, keys: Collection[str], now: float) -> list[Effect]:
        """The holders of these keys may speak no more: what they hold is queued again at once."""
        clients.expel(self.state, keys)
        self._settle(now)
        return self.state.flush()

    def damaged(self, table: str, group: str, now: float) -> list[Effect]:
        """A record of a group was found damaged or missing: it is made again from what is whole."""
        if table == "payloads":
            damage.lose_samples(self.state, group)
        elif table == "prompts":
            damage.lose_prompt(self.state, group)
        elif table == "fields":
            damage.lose_samples(self.state, group.partition("\n")[0])
        elif table == "partials":
            damage.lose_partial(self.state, group)
        self._settle(now)
        return self.state.flush()

    def answer_held(self, event: Event, said: m.Hint, problem: SlimebusError, now: float) -> tuple[m.Message, list[bytes]]:
        """Answer a request while the last decisions cannot be stored: no decision is made and none of those is told.

        Heartbeats keep leases and clients alive and hear again what was `said` last, the status names the problem, everything
        else is to be asked again.
        """
        match event.message:
            case m.Status():
                return m.StatusReply(), [msgspec.json.encode(self.status(now))]
            case m.Heartbeat(leases=listed) if clients.keep_alive(self.state, event, listed, now):
                return m.HeartbeatReply(
                    lineage=said.lineage, version=said.version, publishers=said.publishers, digest=said.digest, finished=said.finished
                ), []
            case _:
                return m.Error(code=problem.code, text=problem.text, retryable=True), []

    def tick(self, now: float) -> list[Effect]:
        """Let time do its work: expired leases, waits that ran out, silent clients."""
        self.state.now = now
        for key in self.state.timers.due(now):
            self._fall_due(key, now)
        self._settle(now)
        watchdog.look(self.state, now)
        return self.state.flush()

    def next_deadline(self) -> float | None:
        """When `tick` should be called, at the latest; None while nothing is due ever."""
        return self.state.timers.next()

    def status(self, now: float) -> dict[str, Any]:
        """The whole picture, with what the process around this machine adds to it."""
        return status.status(self.state, now) | self.outside()

    @property
    def is_over(self) -> bool:
        """True once the run is finished and every worker and trainer that this process has seen has left."""
        return self.state.had_members and self.state.is_finished and clients.has_everyone_left(self.state)

    # --- dispatch ---

    def _handle(self, event: Event, now: float) -> None:
        state, message = self.state, event.message
        clients.check_run(state, event)
        match message:
            case m.Hello():
                client = clients.join(state, event, message, now)
                state.reply(event.to, clients.welcome(state, client, message, self.hints, self.max_message_bytes))
            case m.Goodbye():
                state.reply(event.to, clients.goodbye(state, event))
            case m.Status():
                state.reply(event.to, m.StatusReply(), [Inline(msgspec.json.encode(self.status(now)))])
            case m.Evaluate():
                evaluation.evaluate(state, event, message, now)
            case m.Edit():
                edits.edit(state, event, message)
            case m.Import():
                edits.take_in(state, event, message)
            case m.Set():
                settings.change(state, event, message)
            case _:
                self._handle_member(event, clients.sender_of(state, event, now), now)

    def _handle_member(self, event: Event, client: Client, now: float) -> None:
        state, message = self.state, event.message
        match message:
            case m.Heartbeat():
                state.reply(event.to, clients.heartbeat(state, client, message, now))
            case m.Lease():
                leases.lease(state, event, client, message, now)
            case m.Put():
                leases.put(state, event, client, message)
            case m.GiveBack():
                leases.give_back(state, event, client, message)
            case m.Resume():
                timeline.resume(state, event, message)
            case m.Publish():
                timeline.publish(state, event, message)
            case m.Batch():
                batches.batch(state, event, client, message, now)
            case m.Fetch():
                batches.fetch(state, event, message, self.max_message_bytes)
                watchdog.fetched(state, message.groups, now)
            case m.Commit():
                batches.commit(state, event, message)
            case m.Read():
                consumers.read(state, event, client, message, now)
            case m.PutFields():
                consumers.put_fields(state, event, client, message, self.max_message_bytes)
            case m.Push():
                pushes.push(state, event, message)
            case m.Finish():
                timeline.finish(state, event, message, now)
            case m.Keys():  # a broker with keys answers this before it comes here
                state.reply(event.to, m.KeysReply())
            case _:
                raise ProtocolError(f"{type(message).__name__} is not a request", code="unknown_type")

    def _fall_due(self, key: Any, now: float) -> None:
        state = self.state
        match key:
            case ("lease", lease):
                leases.expire(state, lease)
            case ("parked lease", name, request):
                leases.give_up(state, name, request)
            case ("parked batch", step):
                batches.give_up(state, step, now)
            case ("parked read", name):
                consumers.give_up(state, name)
            case ("parked evaluation", name, request):
                evaluation.give_up(state, name, request)
            case ("stale wait",):
                choice.stop_waiting(state)
            case ("client", name):
                clients.silent(state, name, now)
            case ("source",):
                pass  # its rest is over: whoever waits is dealt to when the burst is settled
            case ("hedge",):
                pass  # deal() looks at what has become slow
            case ("finish",):
                timeline.check_finish(state, now)
            case ("watchdog",):
                watchdog.check(state, now)

    def _settle(self, now: float) -> None:
        """Answer whoever waited for what just happened."""
        leases.deal(self.state, now)
        batches.assign(self.state, now)
        leases.deal(self.state, now)
        consumers.serve(self.state)
        leases.watch_waits(self.state)
        if self.state.is_finished and not self.state.finished_said:
            self.state.finished_said = True
            self.state.notify()
            consumers.finish(self.state)

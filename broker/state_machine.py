"""The entry to the state machine: a burst of events in, their effects out.

The caller performs every Write before it sends any Reply or Notify, and calls `tick` when `next_deadline` has come.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from broker.state import (
    batches,
    clients,
    consumers,
    damage,
    edits,
    ending,
    evaluation,
    heartbeats,
    leases,
    prompts,
    settings,
    staleness,
    status,
    timeline,
    watchdog,
)
from broker.state.broker_state import State
from broker.state.effects import Effect, Event, Table
from broker.state.prompt_source import PromptSource
from broker.state.records import BufferFilter
from broker.state.rules import Rules
from slimebus.bus import messages as m
from slimebus.bus.envelope import error_reply
from slimebus.bus.errors import SlimebusError

Row = tuple[Table, str, bytes | SlimebusError]
"""Table, key and value; an error in place of a value that is damaged."""


class StateMachine:
    """The broker's decisions. Deterministic: the same rows, events and times give the same effects.

    `buffer_filter` chooses the groups of batches; None: first in, first out.
    `validates`: BrokenState is raised when tables of the state disagree after an event; for tests.
    `first_id`: where epochs and leases begin; a number that no earlier broker of the same run has reached.
    """

    def __init__(
        self, rules: Rules, source: PromptSource, *, run: str, hints: str = "", max_message_bytes: int = 0, first_id: int = 1,
        buffer_filter: BufferFilter | None = None, validates: bool = False,
    ) -> None:  # fmt: skip
        self.validates = validates
        self.state = State(rules, source, run, buffer_filter, hints=hints, max_message_bytes=max_message_bytes, first_id=first_id)

    # --- after a restart ---

    def restore(self, rows: Iterable[Row], now: float) -> None:
        """Take up the stored state. Leases and clients get a full deadline from `now`.

        A damaged row costs what it held (broker/state/damage.py). Raises UsageError for other data; SlimebusError, msgspec.DecodeError
        or UnicodeDecodeError where `meta` or `source` is damaged, without which no broker can go on.
        """
        state, lost = self.state, []
        state.now = now
        records: defaultdict[str, list[Any]] = defaultdict(list)
        for table, key, value in rows:
            try:
                records[table].append(damage.decode_row(table, key, value))
            except (SlimebusError, msgspec.DecodeError, UnicodeDecodeError) as bad:
                if table in ("meta", "source"):
                    raise
                lost.append((table, key, str(bad)))
        state.restore(records)
        settings.restore(state)
        evaluation.cancel_impossible(state)
        damage.recover_rows(state, lost)
        clients.restart(state)
        state.leases.restart(now, now + state.rules.lease_s)
        ending.await_confirmation(state)
        state.timers.set(("free", None), now)
        watchdog.resume_watch(state)

    # --- events ---

    def conflicting_peers(self, events: Iterable[Event]) -> set[bytes]:
        """The peers that the hellos of a burst ask to replace."""
        asked = [(event.sender, event.message) for event in events if isinstance(event.message, m.Hello)]
        return {holder.peer for name, hello in asked for holder in clients.conflicting_clients(self.state, name, hello) if holder.peer}

    def apply(
        self, events: Sequence[Event], now: float, *, store_problem: str = "", lost_peers: Collection[bytes] = ()
    ) -> list[Effect]:  # fmt: skip
        """Decide on a burst of requests. One that cannot be done changes nothing and is answered with its error.

        Waiting requests are answered once a burst, after its last request. `store_problem`: why the store takes no
        samples now; empty when it does. `lost_peers`: of the `conflicting_peers`, those without a connection.
        """
        self.state.now, self.state.store_problem, self.state.lost_peers = now, store_problem, lost_peers
        for event in events:
            try:
                clients.check_sender(self.state, event)
                HANDLERS[type(event.message)](self.state, event, event.message)
            except SlimebusError as problem:
                self.state.reply(event.to, error_reply(problem))
        return self._drain_effects()

    def note_store_problem(self, problem: str) -> None:
        """The store takes nothing now: the status says so, with who waits for it."""
        self.state.store_problem = problem

    def revoke_keys(self, keys: Collection[str], now: float) -> list[Effect]:
        """These keys are valid no more: what their holders lease is queued again at once."""
        self.state.now = now
        clients.revoke_keys(self.state, keys)
        return self._drain_effects()

    def recover_record(self, table: str, key: str, now: float) -> list[Effect]:
        """A record of a group was found damaged or missing: it is made again from what is whole."""
        self.state.now = now
        damage.recover_record(self.state, table, key)
        return self._drain_effects()

    def tick(self, now: float, heard_until: float | None = None) -> list[Effect]:
        """Let time do its work: expired leases, waits that ran out, silent clients.

        heard_until: what falls due later is left, as messages that were sent before it may be unread; None: all are read.
        """
        self.state.now = now
        for kind, subject in self.state.timers.due(now if heard_until is None else heard_until):
            DUE[kind](self.state, subject)
        return self._drain_effects()

    def _drain_effects(self) -> list[Effect]:
        """Answer the requests that waited for what just happened; all effects of it."""
        state = self.state
        batches.assign(state)
        leases.deal(state)  # behind it: a batch makes room, and moves the step that a new group is admitted for
        consumers.answer_waiting_reads(state)
        ending.watch_evaluations(state)
        if ending.announce(state):
            state.notify()
            for key in list(state.waiting_leases):
                leases.answer_timed_out(state, key)
            for name in list(state.waiting_reads):
                consumers.answer_timed_out(state, name)
        watchdog.note_progress(state)
        if self.validates:
            state.validate()
        return state.flush()

    # --- questions ---

    def next_deadline(self) -> float | None:
        """When `tick` should be called, at the latest; None while nothing is due ever."""
        return self.state.timers.next()

    def status(self, now: float) -> dict[str, Any]:
        """The whole picture."""
        self.state.now = now
        return status.status(self.state)

    @property
    def is_over(self) -> bool:
        """True once the run is finished, every worker and trainer that this process has seen has left, and every consumer knows it."""
        return self.state.had_members and ending.is_over(self.state)


HANDLERS: dict[type[m.Message], Callable[[State, Event, Any], None]] = {
    m.Hello: clients.hello,
    m.Heartbeat: heartbeats.heartbeat,
    m.Goodbye: clients.goodbye,
    m.Lease: leases.lease,
    m.Put: leases.put,
    m.GiveBack: leases.give_back,
    m.Resume: timeline.resume,
    m.Publish: timeline.publish,
    m.Batch: batches.batch,
    m.Fetch: batches.fetch,
    m.Reject: damage.reject,
    m.Commit: batches.commit,
    m.Finish: ending.finish,
    m.Read: consumers.read,
    m.PutFields: consumers.put_fields,
    m.Status: lambda state, event, request: state.reply(event.to, m.StatusReply()),
    m.Evaluate: evaluation.evaluate,
    m.Set: settings.change,
    m.Push: prompts.push,
    m.Edit: edits.edit,
    m.Import: edits.import_group,
    m.Command: heartbeats.command,
    m.Keys: lambda state, event, request: state.reply(event.to, m.KeysReply()),  # a broker with keys answers this before
}
"""What answers each request; slimebus/security/roles.py says who may send it."""

DUE: dict[str, Callable[[State, Any], None]] = {
    "unconfirmed lease": leases.expire_unconfirmed,
    "leases of": leases.expire_worker,
    "recalled lease": staleness.end_recalled_lease,
    "lease": leases.answer_timed_out,
    "batch": batches.answer_timed_out,
    "read": consumers.answer_timed_out,
    "evaluate": evaluation.answer_timed_out,
    "client": clients.on_silence,
    "source": lambda state, _: None,  # its rest is over: requests that wait are dealt to when the burst is settled
    "finish": lambda state, _: ending.confirm_finish(state),
    "unserved evaluation": ending.end_unserved,
    "free": lambda state, _: batches.free(state),
    "watchdog": lambda state, _: watchdog.check_stalled(state),
}
"""What is done when a timer falls due; the key of a timer is (one of these, its subject)."""

"""Deliberate bugs, one at a time: the simulation must catch each of them within a few seeds, or it would not catch a real one."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
from simulation import broker_process

from broker import suspend_tolerant_clock
from broker.state import admission, batches, clients, ending, leases, prompts, staleness, timeline, transitions
from broker.state.broker_state import State
from broker.state.groups import COMMITTED, LEASED, Group, Groups
from broker.state.waiting import WaitingRequests
from broker.state_machine import StateMachine
from slimebus.bus import sample_table
from slimebus.bus.messages import BatchReply

Patch = tuple[Any, str, Any]

_apply_transition, _delete, _changed, _sender_of = transitions.apply_transition, State.delete, State.changed, clients.sender_of
_park, _restore_meta, _drain_effects = WaitingRequests.park, State._restore_meta, StateMachine._drain_effects
_reply_with_batch = batches._batch_reply
_recall = staleness.recall_lease
_commit = broker_process.BrokerProcess._commit


def _keep_abandoned(state: State, group: Group, cause: str, reason: str = "") -> None:
    if "version of the abandoned timeline" not in reason:
        _apply_transition(state, group, cause, reason)


def _forget_expiry(state: State, group: Group, cause: str, reason: str = "") -> None:
    if reason != "lease expired":
        _apply_transition(state, group, cause, reason)


def _keep_payloads(state: State, table: Any, key: str) -> None:
    if table != "payloads":
        _delete(state, table, key)


def _keep_partials(state: State, table: Any, key: str) -> None:
    if table != "partials":
        _delete(state, table, key)


def _recall_without_deadline(state: State, group: Group) -> None:
    _recall(state, group)
    state.timers.cancel(("recalled lease", group.lease.id))


def _keep_prompts(state: State, table: Any, key: str) -> None:
    if table != "prompts":
        _delete(state, table, key)


def _forget_steps(state: State, table: Any, key: str | int) -> None:
    if table != "steps":
        _changed(state, table, key)


def _ignore_epoch(state: State, event: Any) -> Any:
    client = state.clients.get(event.sender)
    return client if client is not None and event.epoch else _sender_of(state, event)


def _answer_first(process: Any, writes: Any) -> None:
    """Nothing is durable when it is answered: the commit comes a turn later, or never."""
    late = process.__dict__.setdefault("late_writes", {})
    writes, process.late_writes = [*late.values()], {(w.table, w.key): w for w in writes}
    late.clear()
    if writes:
        _commit(process, writes)


def _take_newest(groups: Groups, kind: str = "train") -> Any:
    queued = [g for g in groups.by_id.values() if g.kind == kind and g.phase == "queued"]
    return max(queued, key=lambda g: g.position, default=None)


def _free_too_much(state: State, max_bytes: float | None = None) -> None:
    for group in [g for g in state.groups.by_id.values() if g.phase == COMMITTED]:
        state.groups.remove(group)
        state.changed("groups", group.id)
        state.delete("payloads", group.id)
        state.delete("prompts", group.id)


def _jumping(clock: suspend_tolerant_clock.SuspendTolerantClock) -> float:
    seen = clock.clock.monotonic()
    clock.now, clock._seen = clock.now + max(0.0, seen - clock._seen), seen
    return clock.now


def _forget_parked(state: State, client: Any) -> None:
    for step in [step for step, waiting in state.waiting_batches.items() if waiting.client == client.name]:
        state.waiting_batches.take_out(step)


def _wait_anew(waiting: Any, key: Any, *request: Any) -> None:
    waiting.take_out(key)
    _park(waiting, key, *request)


def _stay_finished(state: State, meta: Any) -> None:
    _restore_meta(state, meta)
    state.meta.finishing = meta.finishing


def _deal_first(machine: StateMachine) -> Any:
    leases.deal(machine.state)
    return _drain_effects(machine)


def _answer_otherwise(state: State, step: int) -> BatchReply:
    """A step that is asked for again has other groups: the same ones turned round, so that nothing else breaks first."""
    reply = _reply_with_batch(state, step)
    return msgspec.structs.replace(reply, groups=reply.groups[::-1]) if step in state.fetched_steps else reply


MUTATIONS: dict[str, Patch] = {
    "groups are leased before the batch of the turn is chosen": (StateMachine, "_drain_effects", _deal_first),
    "the batch of a step is another one when it is asked for again": (batches, "_batch_reply", _answer_otherwise),
    "a repeated request waits anew": (WaitingRequests, "park", _wait_anew),
    "names may be of any length": (clients, "check_name", lambda what, name: None),
    "what a put says of its samples is believed": (sample_table, "_check_attempts", lambda table, num_samples: None),
    "a finished run that is given more steps is still finished": (State, "_restore_meta", _stay_finished),
    "nothing is ever stale": (staleness, "is_stale", lambda state, group, step: False),
    "an expired lease does not requeue": (transitions, "apply_transition", _forget_expiry),
    "a rewind keeps samples of abandoned versions": (transitions, "apply_transition", _keep_abandoned),
    "a run begun anew forgets what was freed": (prompts, "begin_anew", lambda state: None),
    "a rewind leaves old leases": (timeline, "_revoke_leases", lambda state: None),
    "a living process is replaced without take-over": (clients, "_check_place_is_free", lambda state, name, ask: None),
    "a process that was killed keeps its place": (StateMachine, "conflicting_peers", lambda machine, events: set()),
    "two trainers may train": (timeline, "fence_older_trainers", lambda state, newest: None),
    "a fenced trainer's parked requests are forgotten": (clients, "_answer_fenced", _forget_parked),
    "an older process of the same name is still served": (clients, "sender_of", _ignore_epoch),
    "admission has no bound": (
        admission,
        "refusal_for",
        lambda state, client, needs_weights: admission.unready_weights(state, client),
    ),
    "a rewind keeps partials of abandoned versions": (leases, "rewind_partials", lambda state, step, version: None),
    "a recall has no deadline": (staleness, "recall_lease", _recall_without_deadline),
    "partials are never deleted": (State, "delete", _keep_partials),
    "a put needs no lease": (
        leases,
        "_why_lost",
        lambda group, client, done: "" if group is not None and group.phase == LEASED else "lost",
    ),
    "a repeated lease request is granted more": (Groups, "leased_at", lambda groups, worker, request: []),
    "payloads are never deleted": (State, "delete", _keep_payloads),
    "prompts are never deleted": (State, "delete", _keep_prompts),
    "the groups of a step are not on disk": (State, "changed", _forget_steps),
    "answers go out before the commit": (broker_process.BrokerProcess, "_commit", _answer_first),
    "the newest queued prompt goes first": (Groups, "first_queued", _take_newest),
    "a commit frees steps that no checkpoint has": (batches, "free", _free_too_much),
    "the broker's own stop counts as everyone's silence": (suspend_tolerant_clock.SuspendTolerantClock, "advance", _jumping),
    "an evaluation that nobody can serve holds the end for ever": (ending, "why_unserved", lambda state, running: ""),
    "a worker that leaves keeps its leases": (clients, "end_lease", lambda state, group, cause, reason: None),
}
"""Name: what is replaced, and by what."""


@contextlib.contextmanager
def applied(patch: Patch) -> Iterator[None]:
    """The bug is there within this context."""
    owner, attribute, bug = patch
    with mock.patch.object(owner, attribute, bug):
        yield

"""Heartbeats: a worker says which leases it works on, and hears the truth; commands reach it, and their outcomes come back.

A command is kept until a heartbeat of its worker tells what became of it. A broker that restarts is asked again.
"""

import itertools
from collections.abc import Collection

import msgspec

from broker.state.broker_state import State
from broker.state.clients import note_end_told, set_serving
from broker.state.effects import Event
from broker.state.groups import WorkerLeases
from broker.state.records import ClientRecord
from slimebus.bus import messages as m
from slimebus.bus.envelope import one_line
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import LEASE_SUM_MODULUS

MAX_NAME_CHARS, MAX_ENGINE_CHARS = 64, 256
"""Of a metric's name and of each text about an engine: every status has those of all clients."""
MAX_METRICS, MAX_METRIC = 64, 1e100
"""Of a heartbeat; NaN and larger ones are left out: JSON has no word for them, nor for their sum."""
MAX_PLACE_CHARS = 200
"""Of `blocked_at`: the end of a path says more than its beginning."""
MAX_COMMANDS = 64
"""Outcomes remembered, and commands outstanding, of a worker."""


def heartbeat(state: State, event: Event, beat: m.Heartbeat) -> None:
    """Extend the leases of a client that agrees on which they are, ask one that does not for its list, and answer with the truth."""
    client = state.clients[event.sender]
    client.state = one_line(beat.state[:64])
    metrics = itertools.islice(((name, value) for name, value in beat.metrics.items() if len(name) <= MAX_NAME_CHARS), MAX_METRICS)
    client.metrics = {name: value for name, value in metrics if abs(value) <= MAX_METRIC}
    set_serving(state, client, beat.lineage, beat.serving)
    client.engines = [msgspec.structs.replace(one, **_limit_report(one)) for one in beat.engines]
    note_end_told(client, event.to.request, is_finished=state.is_finished)
    client.blocked_s, client.blocked_at = beat.blocked_s, one_line(beat.blocked_at[-MAX_PLACE_CHARS:])
    outstanding = record_outcomes(client, beat.outcomes)
    reply = m.HeartbeatReply(**state.meta.newest(), finished=state.is_finished, hints=state.hints_address, commands=outstanding)
    leases = state.groups.by_worker.get(client.name) or WorkerLeases()
    if beat.leases is not None:
        _reconcile_leases(state, client, leases, beat.leases, reply)
    elif _match_lease_sum(leases.groups, beat):
        state.leases.confirm(client.name, list(leases.unconfirmed))
    else:
        reply.list_leases = not _match_lease_sum(leases.groups.keys() - leases.unconfirmed, beat)
    reply.recalled = [lease for lease, group in leases.groups.items() if group.lease.is_recalled]
    if not reply.list_leases:
        state.leases.extend(client.name, state.now + state.rules.lease_s)
    state.reply(event.to, reply)


def _limit_report(engine: m.EngineReport) -> dict[str, str]:
    return {name: one_line(getattr(engine, name)[:MAX_ENGINE_CHARS]) for name in ("url", "model", "state")}


def _match_lease_sum(leases: Collection[int], beat: m.Heartbeat) -> bool:
    """True when these are as many leases as the worker works on, and of the same sum."""
    return len(leases) == beat.num_leases and sum(leases) % LEASE_SUM_MODULUS == beat.lease_sum


def _reconcile_leases(state: State, client: ClientRecord, leases: WorkerLeases, listed: Collection[int], reply: m.HeartbeatReply) -> None:
    """Take a client's own list: what it lacks ends unless a later heartbeat names it; the answer lists what it holds no more."""
    named = set(listed)
    state.leases.confirm(client.name, leases.unconfirmed & named)
    state.leases.unconfirm(client.name, leases.groups.keys() - leases.unconfirmed - named, state.now + state.rules.lease_s)
    for lease in listed:
        if lease not in leases.groups:
            (reply.surplus if state.leases.results.get(lease) == "surplus" else reply.lost).append(lease)


# --- commands ---


def command(state: State, event: Event, request: m.Command) -> None:
    """Hand a command to its worker, or say what became of it."""
    worker = _find_worker(state, request)
    outcome = worker.outcomes.get(request.key)
    if outcome is None and request.key not in worker.commands:
        if len(worker.commands) >= MAX_COMMANDS:
            raise state.busy("commands", f"{worker.name} has {MAX_COMMANDS} commands to do")
        worker.commands = {**worker.commands, request.key: request}
        state.note(f"{worker.name} has to {request.action} {request.url}".rstrip())
    state.reply(event.to, outcome or m.CommandReply(worker=worker.name))


def _find_worker(state: State, request: m.Command) -> ClientRecord:
    workers = {c.name: c for c in state.clients.values() if c.role == "rollout" and not c.is_gone and not c.is_fenced}
    names = ", ".join(workers) or "none"
    if not request.worker and len(workers) != 1:
        raise SlimebusError(f"name one of the workers of this run: {names}", code="no_worker")
    if request.worker and request.worker not in workers:
        raise SlimebusError(f"no worker {request.worker[:64]!r} in this run; there are: {names}", code="no_worker")
    return workers[request.worker] if request.worker else next(iter(workers.values()))


def record_outcomes(worker: ClientRecord, outcomes: dict[str, m.CommandReply]) -> list[m.Command]:
    """What became of commands; those that the worker is still to be told of, or is at."""
    if outcomes:
        worker.outcomes = dict(list({**worker.outcomes, **outcomes}.items())[-MAX_COMMANDS:])
        worker.commands = {key: request for key, request in worker.commands.items() if key not in outcomes}
    return list(worker.commands.values())

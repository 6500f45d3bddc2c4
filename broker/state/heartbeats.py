"""Heartbeats: a worker says which leases it works on, and hears the truth; commands reach it, and their outcomes come back.

A command is kept until a heartbeat of its worker tells what became of it. A broker that restarts is asked again.
"""

from collections.abc import Collection

from broker.state.broker_state import State
from broker.state.clients import MAX_COMMANDS, add_command, note_end_told, record_outcomes, record_report, set_serving
from broker.state.effects import Event
from broker.state.groups import WorkerLeases
from broker.state.records import ClientRecord
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import LEASE_SUM_MODULUS


def heartbeat(state: State, event: Event, beat: m.Heartbeat) -> None:
    """Extend the leases of a client that agrees on which they are, ask one that does not for its list, and answer with the truth."""
    client = state.clients[event.sender]
    record_report(client, beat)
    set_serving(state, client, beat.lineage, beat.serving)
    note_end_told(client, event.to.request, is_finished=state.is_finished)
    outstanding = record_outcomes(client, beat.outcomes)
    reply = m.HeartbeatReply(**state.meta.newest(), finished=state.is_finished, hints=state.hints_address, commands=outstanding)
    leases = state.groups.by_worker.get(client.name) or WorkerLeases()
    if beat.leases is not None:
        _reconcile_leases(state, client, leases, beat.leases, reply)
    elif _match_lease_sum(leases.groups, beat):
        state.leases.confirm(list(leases.unconfirmed))
    else:
        reply.list_leases = not _match_lease_sum(leases.groups.keys() - leases.unconfirmed, beat)
    reply.recalled = [lease for lease, group in leases.groups.items() if group.lease.is_recalled]
    if not reply.list_leases:
        state.leases.extend(client.name, state.now + state.rules.lease_s)
    state.reply(event.to, reply)


def _match_lease_sum(leases: Collection[int], beat: m.Heartbeat) -> bool:
    """True when these are as many leases as the worker works on, and of the same sum."""
    return len(leases) == beat.num_leases and sum(leases) % LEASE_SUM_MODULUS == beat.lease_sum


def _reconcile_leases(state: State, client: ClientRecord, leases: WorkerLeases, listed: Collection[int], reply: m.HeartbeatReply) -> None:
    """Take a client's own list: what it lacks ends unless a later heartbeat names it; the answer lists what it holds no more."""
    named = set(listed)
    state.leases.confirm(leases.unconfirmed & named)
    state.leases.unconfirm(leases.groups.keys() - leases.unconfirmed - named, state.now + state.rules.lease_s)
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
        add_command(worker, request)
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

"""Commands to workers: kept until a heartbeat of the worker tells what became of them. A broker that restarts is asked again."""

from broker.state.broker_state import State
from broker.state.effects import Event
from broker.state.records import Client
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError

MAX_COMMANDS = 64
"""Outcomes remembered, and commands outstanding, of a worker."""


def command(state: State, event: Event, ask: m.Command) -> None:
    """Hand a command to its worker, or say what became of it."""
    worker = _worker(state, ask)
    outcome = worker.outcomes.get(ask.key)
    if outcome is None and ask.key not in worker.commands:
        if len(worker.commands) >= MAX_COMMANDS:
            raise state.busy("commands", f"{worker.name} has {MAX_COMMANDS} commands to do")
        worker.commands = {**worker.commands, ask.key: ask}
        state.note(f"{worker.name} has to {ask.action} {ask.url}".rstrip())
    state.reply(event.to, outcome or m.CommandReply(worker=worker.name))


def _worker(state: State, ask: m.Command) -> Client:
    workers = {c.name: c for c in state.clients.values() if c.role == "rollout" and not c.is_gone and not c.is_fenced}
    names = ", ".join(workers) or "none"
    if not ask.worker and len(workers) != 1:
        raise SlimebusError(f"name one of the workers of this run: {names}", code="no_worker")
    if ask.worker and ask.worker not in workers:
        raise SlimebusError(f"no worker {ask.worker[:64]!r} in this run; there are: {names}", code="no_worker")
    return workers[ask.worker] if ask.worker else next(iter(workers.values()))


def take_outcomes(worker: Client, outcomes: dict[str, m.CommandReply]) -> list[m.Command]:
    """What became of commands; those that the worker is still to be told of, or is at."""
    if outcomes:
        worker.outcomes = dict(list({**worker.outcomes, **outcomes}.items())[-MAX_COMMANDS:])
        worker.commands = {key: ask for key, ask in worker.commands.items() if key not in outcomes}
    return list(worker.commands.values())

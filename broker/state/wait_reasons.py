"""Who waits for whom, in one line each."""

from collections import Counter

from broker.state import admission, choice
from broker.state.broker_state import State
from broker.state.clients import is_present, is_silent, is_starting
from broker.state.features import consumers
from broker.state.groups import EVAL
from broker.state.records import Client
from broker.state.waiting import Kind
from slimebus.bus.messages import NO_VERSION


def reason_for(state: State, step: int) -> str:
    """Who waits for whom, in one line."""
    if step > state.next_unassigned:
        return f"the trainer waits for batch {step}, but step {state.next_unassigned} has not been asked for"
    parts = [f"trainer waits for batch {step}: {choice.so_far(state, len(state.groups.ready))} ready"]
    holders = Counter(group.lease.worker for group in state.groups.leased_for_training())
    for name, count in holders.most_common(4):
        client = state.clients.get(name)
        silence = f", silent for {state.now - client.heard_at:.0f} s" if client and is_silent(state, client) else ""
        parts.append(f"{count} leased by {name}{silence}")
    if lacking := consumers.why_fields_are_awaited(state):
        parts.append(lacking)
    elif not holders:
        parts.append(_why_no_leases(state))
    return "; ".join(parts)


def _why_no_leases(state: State) -> str:
    num_workers = sum(c.role == "rollout" and not c.is_gone for c in state.clients.values())
    if not num_workers:
        return "no rollout worker is connected"
    if state.waiting_leases:
        waiting = next(iter(state.waiting_leases.values()))
        return f"{waiting.client} waits: {admission.why_waiting(state, waiting)}"
    if state.meta.version == NO_VERSION:
        return "no weights are published yet"
    if scored := sum(group.kind == EVAL for group in state.groups.by_lease.values()):
        return f"none leased; workers sample {scored} prompts of an evaluation"
    workers = "1 worker is connected and asks" if num_workers == 1 else f"{num_workers} workers are connected and ask"
    return f"none leased; {workers} for nothing; the logs of workers and engines say why"


def why_leases_wait(state: State) -> dict[Kind, str]:
    """Why the lease requests of each kind wait."""
    return {waiting.kind: admission.why_waiting(state, waiting) for waiting in state.waiting_leases.one_of_each_kind()}


def waiting(state: State) -> list[str]:
    """One line for each role that waits, naming what it waits for."""
    lines = [f"the broker waits for its store: {state.store_problem}"] if state.store_problem else []
    asked = {step: state.clients.get(waiting.client) for step, waiting in sorted(state.waiting_batches.items())}
    lines += [reason_for(state, step) for step, client in asked.items() if client is not None and is_present(client)]
    lines += _lease_lines(state)
    for client in state.clients.values():
        silence = f", last heard {state.now - client.heard_at:.0f} s ago" if is_silent(state, client) else ""
        if is_starting(client) and not client.is_fenced:
            lines.append(f"{client.title} is {client.state}{silence}")
        elif client.role != "client" and not client.is_fenced and silence:
            lines.append(f"{client.title} has been silent for {state.now - client.heard_at:.0f} s")
    trainer = trainer_of(state)
    if trainer and not state.meta.lineage:
        lines.append(f"everyone waits for {trainer.title}, which has joined and is loading")
    elif not trainer and not state.is_finished and not state.is_finishing:
        lines.append("everyone waits for a trainer to join")
    return lines


def _lease_lines(state: State) -> list[str]:
    """One line for each reason for which lease requests wait."""
    workers: dict[str, list[str]] = {}
    for kind, reason in why_leases_wait(state).items():
        keys = state.waiting_leases.by_kind[kind]
        workers.setdefault(reason, []).extend(name for name, _ in keys)
    return [
        f"{names[0]} waits for a lease: {reason}" if len(names) == 1 else f"{len(names)} workers wait for a lease: {reason}"
        for reason, names in list(workers.items())[:8]
    ]


def trainer_of(state: State) -> Client | None:
    """The trainer that takes part."""
    return next((c for c in state.clients.values() if c.role == "trainer" and is_present(c)), None)

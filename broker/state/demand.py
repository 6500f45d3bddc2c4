"""How many more workers would be busy now, for an autoscaler; negative: so many are not needed.

room    groups that could be leased at once beyond those that are, by the bound, the buffer and the prompts
spare   groups that the present workers already ask for, or will once they serve the newest version
g, t    groups that a worker makes at once (90% quantile) and seconds that a group takes (median), of the last 64 puts
needed  workers that keep up with the trainer: (B / seconds of training a step) x t / g

demand = ceil((room - spare) / g), with a bound above 0 at most needed - present, but 1 while the trainer waits for its next batch
       = -(workers that held no lease for two whole steps) where that is 0
"""

import math
from typing import Any

from broker.state import admission, prompts
from broker.state.clients import is_present
from broker.state.groups import EVAL, QUEUED
from broker.state.pace import quantile
from broker.state.records import Client
from broker.state.table import State
from slimebus.messages import NO_VERSION

IDLE_STEPS = 2
MAX_ROOM = 1 << 20


def demand(state: State) -> int:
    """Workers that would be busy at once if they were there; negative for those that are not needed, 0 when it is as it should be."""
    workers = _workers(state)
    if state.is_finished:
        return -len(workers)
    if state.meta.version == NO_VERSION:
        return 0 if workers else 1
    more = math.ceil(max(0, room(state) - spare(state, workers)) / groups_per_worker(state))
    if more and not workers:
        return max(1, min(more, MAX_ROOM if state.pace.concurrency else 1))
    return min(more, _most(state, workers)) or -sum(is_idle(state, client) for client in workers)


def parts(state: State) -> dict[str, Any]:
    """What the number rests on, for the status."""
    workers = _workers(state)
    known = state.meta.version != NO_VERSION
    return {
        "workers": len(workers),
        "idle_workers": sum(is_idle(state, client) for client in workers),
        "room_groups": room(state) if known else 0,
        "spare_groups": spare(state, workers) if known else 0,
        "groups_per_worker": groups_per_worker(state),
        "group_s": round(quantile(state.pace.group_seconds, 0.5), 3),
        "train_s": round(quantile(state.pace.train_seconds, 0.5), 3),
    }


def room(state: State) -> int:
    """Groups that a worker of the newest version could be given beyond those that are leased."""
    evaluated = sum(num * state.rules.eval_datasets[name].num_samples for name, num in _queued_for_evaluation(state).items())
    return _training_room(state) + math.ceil(evaluated / state.rules.samples_per_prompt)


def _training_room(state: State) -> int:
    version, extra = state.meta.version, 1
    if not admission.has_room(state, version):
        return 0
    while extra < MAX_ROOM and admission.has_room(state, version, extra):
        extra *= 2
    low, high = extra // 2, extra  # there is room for one more behind `low`, none behind `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if admission.has_room(state, version, middle) else (low, middle)
    return min(low + 1, state.groups.count(QUEUED) + prompts.num_waiting(state)) if state.meta.source_ended else low + 1


def _queued_for_evaluation(state: State) -> dict[str, int]:
    """Prompts by held-out set that no worker has yet."""
    waiting: dict[str, int] = {}
    if state.groups.count(QUEUED, EVAL):
        for group in state.groups.by_id.values():
            if group.kind == EVAL and group.phase == QUEUED:
                waiting[group.dataset] = waiting.get(group.dataset, 0) + 1
    return waiting


def spare(state: State, workers: list[Client]) -> int:
    """Groups that the present workers ask for in vain, or will ask for once their weights are ready."""
    present = {client.name for client in workers}
    asked = sum(p.message.want for p in state.parked_leases.values() if p.client in present)
    asking = {p.client for p in state.parked_leases.values()}
    coming = [c for c in workers if c.name not in asking and admission.unready_weights(state, c)]
    return asked + len(coming) * groups_per_worker(state)


def groups_per_worker(state: State) -> int:
    """Groups that a worker makes at once, at least 1."""
    return max(1, round(quantile(state.pace.concurrency, 0.9)))


def is_idle(state: State, client: Client) -> bool:
    """True for a worker that is ready and had nothing to do for two whole steps."""
    if state.groups.leased_by(client.name) or admission.unready_weights(state, client):
        return False
    return state.meta.next_step - state.pace.granted.get(client.name, state.meta.next_step) > IDLE_STEPS


def _workers(state: State) -> list[Client]:
    return [c for c in state.clients.values() if c.role == "rollout" and is_present(c) and c.state != "draining"]


def _most(state: State, workers: list[Client]) -> int:
    """What the trainer's pace can use; training and sampling alternate with a bound of 0, so that there is no such limit."""
    pace = state.pace
    if state.rules.max_staleness == 0 or not pace.train_seconds or not pace.group_seconds:
        return MAX_ROOM
    rate = state.rules.batch_size / max(1e-6, quantile(pace.train_seconds, 0.5))
    needed = rate * quantile(pace.group_seconds, 0.5) / groups_per_worker(state)
    waits = state.meta.next_step in state.parked_batches
    return max(math.ceil(needed) - len(workers), int(waits), 0)

"""What each process waits for, in one line each."""

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from broker.state import admission, choice, consumers, ending, evaluation, prompts
from broker.state.broker_state import State
from broker.state.clients import clients_awaited_at_end, describe_blocked, is_present, is_silent, is_starting
from broker.state.groups import EVAL, Group
from broker.state.records import Cause, ClientRecord, Evaluation
from broker.state.waiting import Kind
from slimebus.bus.messages import NO_VERSION

MAX_NAMES = 4


def find_cause(state: State) -> Cause:
    """Who the run waits for now, in one sentence."""
    meta = state.meta
    trainer = next((c for c in state.clients.values() if c.role == "trainer" and not c.is_fenced), None)
    if state.store_problem:
        return Cause("broker", ["store"], f"step {meta.next_step} waits for the broker's store: {state.store_problem}")
    if state.is_finishing:
        return _with_oldest_lease(state, end_cause(state))
    if trainer is None:
        return Cause("trainer", [state.last_trainer] if state.last_trainer else [], _no_trainer(state))
    if trainer.is_gone or is_silent(state, trainer):
        text = f"{trainer.title} has been silent for {state.now - trainer.heard_at:.0f} s; it {_describe_trainer_activity(state)}"
    elif not meta.lineage:
        text = f"{trainer.title} joined and has not said which step it trains next; {_workers(state)} for it"
    elif meta.version == NO_VERSION:
        text = f"{_workers(state)} for version {meta.base_version} that {trainer.title} has not published"
    elif meta.next_step in state.steps or meta.next_step not in state.waiting_batches:
        text = f"{trainer.title} {_describe_trainer_activity(state)}"
    else:
        return _with_oldest_lease(state, batch_cause(state, meta.next_step))
    return Cause("trainer", [trainer.name], text)


def _no_trainer(state: State) -> str:
    if not state.last_trainer:
        return f"no trainer has joined; {_workers(state)} for one"
    ago = f" {state.now - state.trainer_left_at:.0f} s ago" if state.trainer_left_at < math.inf else ""
    return f"no trainer takes part: {state.last_trainer} left{ago}; step {state.meta.next_step} is next and {_workers(state)} for it"


def _workers(state: State) -> str:
    count = sum(1 for c in state.clients.values() if c.role == "rollout" and is_present(c))
    return "1 worker waits" if count == 1 else f"{count or 'no'} workers wait"


def _describe_trainer_activity(state: State) -> str:
    """What the trainer does with the next step to commit, as far as the broker saw it."""
    pace, step = state.pace, state.meta.next_step
    if step not in state.steps:
        return f"has not asked for batch {step}: {choice.describe_ready(state, len(state.groups.ready))} ready"
    if step not in state.fetched_steps:
        return f"was given batch {step} {state.now - pace.assigned_at:.0f} s ago and has not fetched it"
    begun = max(state.fetched_steps[step], pace.last_progress_at if pace.has_stepped else 0.0)
    text = f"fetched batch {step} and has been training for {state.now - begun:.0f} s"
    if state.meta.version == state.version_of(step + 1) > state.version_of(step):
        return f"{text}; version {state.meta.version} is published, the step is not committed"
    return text


def _with_oldest_lease(state: State, cause: Cause) -> Cause:
    """The same, and where workers are waited for how long the oldest lease has been held."""
    if cause.role != "rollout" or not state.leases.held_since:
        return cause
    lease, since = min(state.leases.held_since.items(), key=lambda item: item[1])
    return msgspec.structs.replace(cause, reason=f"{cause.reason}; lease {lease} has been held for {state.now - since:.0f} s")


# --- a batch ---


def reason_for(state: State, step: int) -> str:
    """What each process waits for, in one line."""
    if step > state.next_unassigned:
        return f"the trainer waits for batch {step}, but step {state.next_unassigned} has not been asked for"
    return batch_cause(state, step).reason


def batch_cause(state: State, step: int) -> Cause:
    """Whom the next batch to be chosen waits for, while too few groups are ready."""
    parts = [f"trainer waits for batch {step}: {choice.describe_ready(state, len(state.groups.ready))} ready"]
    holders, leases = _workers_with_leases(state, state.groups.leased_for_training())
    parts += leases
    if lacking := consumers.why_fields_are_awaited(state):
        parts.append(lacking)
    if lacking and len(state.groups.every_ready()) >= state.rules.batch_size:
        names = {who for name in consumers.missing_fields(state) for who in consumers.producers(state, name)}
        return Cause("consumer", sorted(names)[:MAX_NAMES], "; ".join(parts))
    if holders:
        return Cause("rollout", holders, "; ".join(parts))
    found = _no_leases(state)
    return Cause(found.role, found.who, "; ".join(parts if lacking else [*parts, found.reason]))


def _workers_with_leases(state: State, leased: Iterable[Group]) -> tuple[list[str], list[str]]:
    """Which workers that hold these groups are waited for, where there are some the silent and blocked ones, and a sentence for each."""
    holders = Counter(group.lease.worker for group in leased)
    stuck = {name: why for name in holders if (client := state.clients.get(name)) is not None and (why := _why_stuck(state, client))}
    named = holders.most_common(MAX_NAMES)
    sentences = [f"{count} leased by {name}{f', {stuck[name]}' if name in stuck else ''}" for name, count in named]
    return sorted(stuck or holders)[:MAX_NAMES], sentences


def end_cause(state: State) -> Cause:
    """What a run waits for after its trainer has finished: workers of its last evaluations, then processes that have not left."""
    running = evaluation.running_evaluations(state)
    if not running:
        staying = clients_awaited_at_end(state)
        names, verb = [client.name for client in staying], "has" if len(staying) == 1 else "have"
        return Cause(staying[0].role, names[:MAX_NAMES], f"the run is finished; {_join_names(names)} {verb} not left")
    first = running[0]
    done, total = evaluation.progress(first)
    found = _evaluation_cause(state, first)
    text = f"every step is trained; {done} of {total} prompts are evaluated at version {first.version}; {found.reason}"
    return Cause(found.role, found.who, text)


def _evaluation_cause(state: State, running: Evaluation) -> Cause:
    if why := ending.why_unserved(state, running):
        left_s = min(state.rules.client_timeout_s, state.timers.deadline(("unserved evaluation", running.key)) - state.now)
        return Cause("rollout", [], f"{why}; this evaluation ends in {max(0.0, left_s):.0f} s")
    holders, leases = _workers_with_leases(state, (group for group in state.groups.by_lease.values() if group.evaluation == running.key))
    if holders:
        return Cause("rollout", holders, "; ".join(leases))
    workers = [client for client in state.clients.values() if client.role == "rollout" and is_present(client)]
    serving = [client.name for client in workers if ending.can_serve_evaluation(state, client, running)]
    if not serving:
        names = [client.name for client in workers]
        return Cause("rollout", names[:MAX_NAMES], f"{_join_names(names)} still {_pull_verb(names)} version {running.version}")
    idle = [name for name in serving if name not in state.groups.by_worker]
    what = "could work and asks for nothing" if idle else "serves it and is busy with other groups"
    return Cause("rollout", (idle or serving)[:MAX_NAMES], f"none leased; {_join_names(idle or serving)} {what}")


def _why_stuck(state: State, client: ClientRecord) -> str:
    return f"silent for {state.now - client.heard_at:.0f} s" if is_silent(state, client) else describe_blocked(state, client)


def _no_leases(state: State) -> Cause:
    """Whom the run waits for while no group is leased for training."""
    workers = [c for c in state.clients.values() if c.role == "rollout" and not c.is_fenced]
    present = [c for c in workers if is_present(c)]
    if not present:
        names = [c.name for c in workers]
        return Cause(
            "rollout", names[:MAX_NAMES], f"no rollout worker is connected{f' ({_join_names(names)} fell silent)' if names else ''}"
        )
    if (why_none := prompts.why_none(state)) and not state.groups.first_queued():
        return Cause("broker", ["source"], why_none)
    refusals = {c.name: admission.refusal_for(state, c, needs_weights=True) for c in present}
    name, first = next(iter(refusals.items()))
    if first is not None and first.role == "broker":
        return first
    if all(refusal is not None and refusal.role == "rollout" for refusal in refusals.values()):
        names = [*refusals]
        return Cause("rollout", names[:MAX_NAMES], f"{_join_names(names)} still {_pull_verb(names)} version {state.meta.version}")
    if scored := [group for group in state.groups.by_lease.values() if group.kind == EVAL]:
        names = sorted({group.lease.worker for group in scored})
        return Cause("rollout", names[:MAX_NAMES], f"none leased; workers sample {len(scored)} prompts of an evaluation")
    if first is not None and all(refusals.values()):
        return Cause("trainer", [c.name for c in [trainer_of(state)] if c], f"{name} waits: {first.reason}")
    idle = [name for name, refusal in refusals.items() if refusal is None]
    return Cause("rollout", idle[:MAX_NAMES], f"none leased; {_join_names(idle)} could work and asks for nothing")


def _pull_verb(names: list[str]) -> str:
    return "pulls" if len(names) == 1 else "pull"


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def why_leases_wait(state: State) -> dict[Kind, str]:
    """Why the lease requests of each kind wait."""
    return {waiting.kind: admission.why_waiting(state, waiting) for waiting in state.waiting_leases.one_of_each_kind()}


def waiting_lines(state: State) -> list[str]:
    """One line for each role that waits, naming what it waits for."""
    lines = [f"the broker waits for its store: {state.store_problem}"] if state.store_problem else []
    asked = {step: state.clients.get(waiting.client) for step, waiting in sorted(state.waiting_batches.items())}
    lines += [reason_for(state, step) for step, client in asked.items() if client is not None and is_present(client)]
    if not state.is_finishing:
        lines += _lease_lines(state)
    elif not ending.is_over(state):
        lines.append(end_cause(state).reason)
    for client in state.clients.values():
        silence = f", last heard {state.now - client.heard_at:.0f} s ago" if is_silent(state, client) else ""
        if is_starting(client) and not client.is_fenced:
            lines.append(f"{client.title} is {client.state}{silence}")
        elif client.role != "client" and not client.is_fenced and silence:
            lines.append(f"{client.title} has been silent for {state.now - client.heard_at:.0f} s")
        elif not client.is_fenced and (why := describe_blocked(state, client)):
            lines.append(f"{client.title} is {why}")
    trainer = trainer_of(state)
    if trainer and not state.meta.lineage:
        lines.append(f"everyone waits for {trainer.title}, which has joined and is loading")
    elif not trainer and not state.is_finishing:
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


def trainer_of(state: State) -> ClientRecord | None:
    """The trainer that takes part."""
    return next((c for c in state.clients.values() if c.role == "trainer" and is_present(c)), None)

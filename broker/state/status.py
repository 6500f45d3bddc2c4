"""The whole picture as one JSON object, and one line for each wait: who waits for whom."""

from typing import Any

from broker.state import admission, batches, consumers, demand, evaluation, prompts, settings, watchdog
from broker.state.clients import is_silent
from broker.state.groups import ASSIGNED, COMMITTED, EVAL, LEASED, QUEUED, READY
from broker.state.records import Client
from broker.state.table import FILTERED, ReportingSource, State

MAX_ROWS = 256
"""Clients and waits listed by name; beyond that they are only counted."""


def status(state: State, now: float) -> dict[str, Any]:
    """Everything a person or a tool may want to know. docs/protocol.md describes each key."""
    meta = state.meta
    return {
        "run": meta.run,
        "lineage": meta.lineage,
        "version": meta.version,
        "step": meta.next_step,
        "checkpoint": meta.floor,
        "num_steps": state.rules.num_steps,
        "state": _state(state),
        "settings": settings.described(state.rules),
        "changes": [{"step": c.step, "by": c.by, "text": settings.in_words(c)} for c in state.meta.changes if c.changed],
        "groups": _groups(state),
        "moves": meta.moves,
        "lag": lag(meta.lags),
        "waste": {reason: {"groups": g, "tokens": t} for reason, (g, t) in meta.waste.items()},
        "counted": meta.counted,
        "filter": {
            "groups": meta.counted.get(FILTERED, 0),
            "in_a_row": meta.filtered_in_a_row,
            "limit": state.rules.max_filtered,
        },
        "source": _source(state),
        "skipped_prompts": state.source.skipped if isinstance(state.source, ReportingSource) else [],
        "clients": [_client(state, c, now) for c in list(state.clients.values())[:MAX_ROWS]],
        "parked": _parked(state, now),
        "evaluations": [row for e in list(state.evaluations.values())[-MAX_ROWS:] for row in _evaluation(e)],
        "steps": list(state.recent),
        "consumers": consumers.rows(state, now),
        "store": state.store,
        "waiting": waiting(state, now),
        "stalled": watchdog.report(state, now),
        "demand": demand.demand(state),
        "pace": demand.parts(state),
        "stall_limit_s": round(watchdog.limit_s(state), 3),
    }


def _state(state: State) -> str:
    if state.is_finished:
        return "finished"
    if state.meta.finishing:
        return "evaluating"
    return "running" if state.meta.lineage else "waiting for a trainer"


def _source(state: State) -> dict[str, Any]:
    pushed = sum(end for _, end in state.meta.pushed.values())
    found = {
        "position": state.meta.cursor,
        "ended": state.meta.source_ended,
        "pushed": pushed,
        "waiting": prompts.num_waiting(state),
        **(state.source.report() if isinstance(state.source, ReportingSource) else {}),
    }
    return {**found, "problem": state.source_problem} if state.source_problem else found


def _groups(state: State) -> dict[str, int]:
    ready = {"held": len(state.groups.held)} if state.groups.required else {}
    counts: dict[str, int] = {phase: state.groups.count(phase) for phase in (QUEUED, LEASED, READY, ASSIGNED, COMMITTED)}
    ended = {phase: state.meta.ended.get(phase, 0) for phase in ("dropped", "dead")}
    evaluating = {"eval_queued": state.groups.count(QUEUED, EVAL), "eval_leased": state.groups.count(LEASED, EVAL)}
    return {**counts, **ready, **ended, **evaluating}


def lag(lags: dict[int, int]) -> dict[str, Any]:
    """Mean, max and histogram of the staleness of trained groups, in versions."""
    total = sum(lags.values())
    mean = sum(k * n for k, n in lags.items()) / total if total else 0.0
    return {"mean": mean, "max": max(lags, default=0), "groups": total, "histogram": {str(k): n for k, n in sorted(lags.items())}}


def _client(state: State, client: Client, now: float) -> dict[str, Any]:
    return {
        "name": client.name,
        "role": client.role,
        "epoch": client.epoch,
        "state": "fenced" if client.is_fenced else "gone" if client.is_gone else client.state or "joined",
        "silent_s": round(now - client.heard_at, 3),
        "lineage": client.lineage,
        "version": client.serving,
        "leases": len(state.groups.leased_by(client.name)),
        "metrics": client.metrics,
    }


def _parked(state: State, now: float) -> list[dict[str, Any]]:
    batch = [
        {"kind": "batch", "client": p.client, "step": step, "reason": batches.reason_for(state, step, now)}
        for step, p in sorted(state.parked_batches.items())
    ]
    leases = [
        {"kind": "lease", "client": p.client, "want": p.message.want, "reason": admission.why_parked(state, p)}
        for p in list(state.parked_leases.values())[:MAX_ROWS]
    ]
    evaluations = [
        {"kind": "evaluate", "client": p.client, "key": p.message.key} for p in list(state.parked_evaluations.values())[:MAX_ROWS]
    ]
    reads = [{"kind": "read", "client": name, "reason": consumers.why_parked(state, name)} for name in list(state.parked_reads)[:MAX_ROWS]]
    return [*batch, *leases, *reads, *evaluations]


def _evaluation(running: Any) -> list[dict[str, Any]]:
    return [{"key": running.key, "done": running.is_done, **row} for row in evaluation.results(running)]


def waiting(state: State, now: float) -> list[str]:
    """One line for each role that waits, naming what it waits for."""
    problem = state.store.get("problem") or state.disk_full
    lines = [f"the broker waits for its store: {problem}"] if problem else []
    lines += [batches.reason_for(state, step, now) for step in sorted(state.parked_batches)]
    reasons: dict[str, list[str]] = {}
    for parked in state.parked_leases.values():
        reasons.setdefault(admission.why_parked(state, parked), []).append(parked.client)
    for reason, names in list(reasons.items())[:8]:
        who = names[0] if len(names) == 1 else f"{len(names)} workers"
        lines.append(f"{who} waits for a lease: {reason}" if len(names) == 1 else f"{who} wait for a lease: {reason}")
    for client in state.clients.values():
        if client.role != "client" and not client.is_fenced and is_silent(state, client, now):
            lines.append(f"{client.role} {client.name} has been silent for {now - client.heard_at:.0f} s")
    if not state.meta.lineage:
        lines.append("everyone waits for a trainer to join")
    return lines

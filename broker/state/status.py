"""The whole picture as one JSON object."""

from typing import Any

from broker.state import consumers, diagnosis, evaluation, prompts, settings, watchdog
from broker.state.broker_state import FILTERED, State
from broker.state.clients import describe_blocked, is_present, is_silent, is_starting
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, EVAL, LEASED, QUEUED, READY
from broker.state.records import ClientRecord, quantile
from slimebus.bus import protocol

MAX_CHANGES = 32
MAX_ROWS, MAX_CLIENTS = 256, 1024
"""Waits and evaluations, and clients, listed by name; beyond that they are only counted. Of clients those that need a look come first."""


def status(state: State) -> dict[str, Any]:
    """Everything a person or a tool may want to know. docs/protocol.md describes each key."""
    meta, changes, evaluations = state.meta, list(state.changes.values())[-MAX_CHANGES:], list(state.evaluations.values())[-MAX_ROWS:]
    return {
        "run": meta.run,
        "release": protocol.release(),
        "lineage": meta.lineage,
        "version": meta.version,
        "step": meta.next_step,
        "oldest_checkpoint": meta.oldest_kept_step,
        "num_steps": state.rules.num_steps,
        "state": _state(state),
        "settings": settings.values_for_json(state.rules),
        "changes": [{"step": c.step, "by": c.by, "text": settings.describe_change(c)} for c in changes if c.changed],
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
        "skipped_prompts": state.source.skipped,
        "clients": [_client(state, c) for c in sorted(state.clients.values(), key=lambda c: _rank(state, c))[:MAX_CLIENTS]],
        "parked": _parked(state),
        "evaluations": [{"key": e.key, "done": e.is_done, **row} for e in evaluations for row in evaluation.results(e)],
        "steps": list(state.recent),
        "consumers": consumers.status_rows(state),
        "waiting": diagnosis.waiting_lines(state),
        "stalled": watchdog.stalled_report(state),
        "bounds": _bounds(state),
        "pace": _pace(state),
        "stall_limit_s": round(watchdog.limit_s(state), 3),
    }


def _state(state: State) -> str:
    if state.is_finished:
        return "finished"
    if state.is_finishing:
        return "evaluating"
    return "running" if state.meta.lineage and diagnosis.trainer_of(state) else "waiting for a trainer"


def _source(state: State) -> dict[str, Any]:
    return {
        "position": state.meta.cursor,
        "ended": state.meta.source_ended,
        "pushed": sum(end for _, end in state.meta.pushed.values()),
        "waiting": prompts.num_waiting(state),
        **state.source.report(),
        **({"problem": state.source_problem} if state.source_problem else {}),
    }


def _groups(state: State) -> dict[str, int]:
    return {
        **{phase: state.groups.count(phase) for phase in (QUEUED, LEASED, READY, ASSIGNED, COMMITTED)},
        "committed_bytes": sum(record.size_bytes for record in state.steps.values()),
        **({"held": len(state.groups.awaiting_fields)} if state.groups.required else {}),
        **{phase: state.meta.ended.get(phase, 0) for phase in (DROPPED, DEAD)},
        "eval_queued": state.groups.count(QUEUED, EVAL),
        "eval_leased": state.groups.count(LEASED, EVAL),
    }


def lag(lags: dict[int, int]) -> dict[str, Any]:
    """Mean, max and histogram of the staleness of trained groups, in versions."""
    total = sum(lags.values())
    mean = sum(k * n for k, n in lags.items()) / total if total else 0.0
    return {"mean": mean, "max": max(lags, default=0), "groups": total, "histogram": {str(k): n for k, n in sorted(lags.items())}}


def _pace(state: State) -> dict[str, float]:
    """Who is busy, and the medians of the last 64 groups and steps in seconds: what an autoscaler decides by."""
    workers = [c for c in state.clients.values() if c.role == "rollout" and is_present(c) and c.state != "draining"]
    return {
        "workers": len(workers),
        "idle_workers": sum(c.name not in state.groups.by_worker for c in workers),
        "group_s": round(quantile(state.leases.group_seconds, 0.5), 3),
        "step_s": round(quantile(state.pace.intervals, 0.5), 3),
    }


def _rank(state: State, client: ClientRecord) -> int:
    """Trainers and consumers, then workers that are blocked or silent, then those at work, then those that were replaced."""
    if client.is_fenced:
        return 3
    return 0 if client.role != "rollout" else 1 if client.blocked_s or is_silent(state, client) else 2


def _client(state: State, client: ClientRecord) -> dict[str, Any]:
    is_gone = client.is_gone and not is_starting(client)
    return {
        "name": client.name,
        "role": client.role,
        "release": client.release,
        "epoch": client.epoch,
        "state": "fenced" if client.is_fenced else "gone" if is_gone else describe_blocked(state, client) or client.state or "joined",
        "silent_s": round(state.now - client.heard_at, 3),
        "lineage": client.lineage,
        "version": client.serving,
        "leases": len(state.groups.leased_by(client.name)),
        "metrics": client.metrics,
        "engines": [{name: getattr(engine, name) for name in engine.__struct_fields__} for engine in client.engines],
    }


def _parked(state: State) -> list[dict[str, Any]]:
    reason, why = diagnosis.reason_for, diagnosis.why_leases_wait(state)
    batches = sorted(state.waiting_batches.items())
    leases, evaluations = list(state.waiting_leases.values())[:MAX_ROWS], list(state.waiting_evaluations.values())[:MAX_ROWS]
    return [
        *({"kind": "batch", "client": w.client, "step": step, "reason": reason(state, step)} for step, w in batches),
        *({"kind": "lease", "client": w.client, "want": w.message.want, "reason": why[w.kind]} for w in leases),
        *({"kind": "read", "client": n, "reason": consumers.why_waiting(state, n)} for n in list(state.waiting_reads)[:MAX_ROWS]),
        *({"kind": "evaluate", "client": w.client, "key": w.message.key} for w in evaluations),
    ]


def _bounds(state: State) -> dict[str, dict[str, Any]]:
    """Name -> limit, how much of it is used, how often it was hit."""
    rules = state.rules
    used = {
        "max_clients": (rules.max_clients, len(state.clients)),
        "max_parked": (rules.max_parked, len(state.waiting_leases)),
        "max_parked_per_client": (rules.max_parked_per_client, None),
        "buffer_capacity": (rules.capacity, state.num_in_flight),
    }
    return {name: {"limit": limit, "used": now, "hits": state.bound_hits[name]} for name, (limit, now) in used.items()}

"""Whether the run stands still, learned from the run itself, and who it waits for.

A run stands still when no step was committed for longer than its own pace explains. With the seconds between the last commits:

    limit = max(stall_min_s, 4 x their 90% quantile, 1.5 x the longest)

An interval enters with at most twice the limit that was in force: one long stop does not blunt the watch, a run that really becomes
slower is learned within a few steps. Before the first step of a timeline and behind its last one anything that moves counts (somebody
joins or leaves the finished run, a version, a finished group, tokens that workers report), and the limit is what is known: ten times
`stall_min_s`, twice the lease, four times the slowest group so far.
"""

from typing import Any

import msgspec

from broker.state import diagnosis, ending
from broker.state.broker_state import State
from broker.state.clients import clients_awaited_at_end
from broker.state.records import quantile

QUANTILE = 0.9
TIMES_QUANTILE = 4.0
TIMES_LONGEST = 1.5
MAX_GROWTH = 2.0
TIMES_MIN = 10.0
TIMES_SLOWEST = 4.0
MIN_LEARNED = 3
"""Intervals before the learned limit may be below that of the first step."""
MAX_BURST_STEPS = 8
"""Steps committed in one burst count at most so often."""
KEPT_INTERVALS = 16
"""So many survive a restart of the broker."""

# --- watching ---


def note_progress(state: State) -> None:
    """Notice what moved since the last look. Called after every burst of events; the watch begins when somebody joins."""
    pace, meta = state.pace, state.meta
    if not state.num_joined and pace.progress_key == ():
        return
    if state.num_trainers_joined > pace.num_trainers:
        pace.num_trainers, pace.has_stepped = state.num_trainers_joined, False
    if meta.next_step > pace.next_step and meta.lineage == pace.lineage:
        _note_committed_steps(state)
    elif _progress_key(state) != pace.progress_key:
        _restart_deadline(state, "a trainer begins a timeline" if meta.lineage != pace.lineage else "something moves")
    if pace.assigned != meta.next_step and meta.next_step in state.steps:
        pace.assigned, pace.assigned_at = meta.next_step, state.now


def _progress_key(state: State) -> tuple[Any, ...]:
    """Changes when a timeline begins; before its first step also with anything that brings that step nearer."""
    meta, pace = state.meta, state.pace
    if _goes_by_steps(state) and meta.lineage == pace.lineage:
        return (meta.lineage,)
    done = meta.counted.get("samples put", 0) + meta.moves.get("eval leased>done scored", 0)
    end = (meta.finishing, state.is_evaluating, len(clients_awaited_at_end(state))) if meta.finishing else ()
    return (meta.lineage, end, meta.version, done, state.num_joined, len(state.steps))


def _goes_by_steps(state: State) -> bool:
    """False before the first step of a timeline and behind its last one, where all that moves counts."""
    return state.pace.has_stepped and not state.meta.finishing


def _note_committed_steps(state: State) -> None:
    pace, num_steps = state.pace, state.meta.next_step - state.pace.next_step
    if pace.has_stepped:
        took = min((state.now - pace.last_progress_at) / num_steps, MAX_GROWTH * limit_s(state))
        pace.intervals.extend([took] * min(num_steps, MAX_BURST_STEPS))
        state.meta.step_seconds = [round(seconds, 3) for seconds in list(pace.intervals)[-KEPT_INTERVALS:]]
    pace.has_stepped = True
    _restart_deadline(state, f"step {state.meta.next_step - 1} is committed")


def _restart_deadline(state: State, what: str) -> None:
    pace = state.pace
    if pace.stalled_at is not None:
        state.note(f"no longer stalled: {what} after {state.now - pace.last_progress_at:.0f} s")
    if state.meta.lineage != pace.lineage:
        pace.has_stepped = False
    pace.last_progress_at, pace.stalled_at = state.now, None
    pace.next_step, pace.lineage = state.meta.next_step, state.meta.lineage
    pace.progress_key = _progress_key(state)
    state.timers.set(("watchdog", None), state.now + limit_s(state))


def resume_watch(state: State) -> None:
    """After a restart of the broker: the pace of its last steps is known, the watch begins anew."""
    pace = state.pace
    pace.intervals.extend(state.meta.step_seconds)
    if state.had_members:
        pace.lineage, pace.has_stepped = state.meta.lineage, bool(pace.intervals)
        _restart_deadline(state, "the broker was restarted")


# --- judging ---


def limit_s(state: State) -> float:
    """Seconds without a step that the run's own pace does not explain."""
    pace, least = state.pace, state.rules.stall_min_s
    learned = max(TIMES_QUANTILE * quantile(pace.intervals, QUANTILE), TIMES_LONGEST * max(pace.intervals, default=0.0))
    if _goes_by_steps(state) and len(pace.intervals) >= MIN_LEARNED:
        return max(least, learned)
    slowest_s = max(state.leases.group_seconds, default=0.0)
    return max(TIMES_MIN * least, 2 * state.rules.lease_s, TIMES_SLOWEST * slowest_s, learned)


def check_stalled(state: State) -> None:
    """The deadline has come: say once who is waited for, or look again later."""
    pace, now = state.pace, state.now
    if pace.stalled_at is not None or ending.is_over(state):
        return
    num_tokens = sum(client.metrics.get("tokens", 0.0) for client in state.clients.values())
    had_tokens, pace.num_tokens = pace.num_tokens, num_tokens
    if not _goes_by_steps(state) and num_tokens > had_tokens:
        _restart_deadline(state, "workers make tokens")
    quiet_s, limit = now - pace.last_progress_at, limit_s(state)
    if now < pace.last_progress_at + limit:  # as the timer was set: rounded alike, or it would fall due again at once
        state.timers.set(("watchdog", None), pace.last_progress_at + limit)
        return
    pace.stalled_at = now
    state.note(f"stalled for {quiet_s:.0f} s (limit {limit:.0f} s): {diagnosis.find_cause(state).reason}", is_warning=True)


def stalled_report(state: State) -> dict[str, Any] | None:
    """The `stalled` section of the status; None while the run moves, and once it is over."""
    since_s, limit = state.now - state.pace.last_progress_at, limit_s(state)
    is_stuck = bool(state.store_problem) and since_s >= limit  # a store that takes nothing: no timer is looked at
    if (state.pace.stalled_at is None and not is_stuck) or ending.is_over(state):
        return None
    return {"since_s": round(since_s, 3), "limit_s": round(limit, 3), **msgspec.structs.asdict(diagnosis.find_cause(state))}

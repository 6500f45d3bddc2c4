"""What becomes of a group: one row for each thing that can happen to it in each phase, and one function that carries it out.

Three counters of a group end in its death: `failures` after max_attempts; `losses` (workers that vanished with it, in a row) and
`times_stale` after LOSS_LIMIT_FACTOR x max_attempts. A worker that is killed or restarted says little about its groups, so it takes more of
them; a prompt that kills each of its workers, or is too stale each time it is done, ends all the same.
"""

from typing import NamedTuple

from broker.state import prompts
from broker.state.broker_state import State
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, LEASED, QUEUED, READY, Group, Phase
from slimebus.bus.envelope import one_line
from slimebus.bus.errors import SlimebusError

LOSS_LIMIT_FACTOR = 3
"""Of max_attempts: what a group may lose its workers, or be too stale, in a row."""


class Transition(NamedTuple):
    """The next phase; the counter that rises; whether samples and a partial are kept; the outcome that a stateful source learns."""

    phase: Phase
    counts: str = ""
    keeps_samples: bool = False
    keeps_partial: bool = True
    outcome: str = ""


TO_DROPPED = Transition(DROPPED, keeps_partial=False, outcome="dropped")
TO_DEAD = Transition(DEAD, keeps_partial=False, outcome="dead")
REQUEUE = Transition(QUEUED, outcome="requeued")

TRANSITIONS: dict[tuple[Phase, str], Transition] = {
    (QUEUED, "leased"): Transition(LEASED),
    (LEASED, "put"): Transition(READY, keeps_samples=True),
    **{(LEASED, cause): Transition(QUEUED) for cause in ("returned", "worker left", "abandoned", "damaged")},
    (LEASED, "worker lost"): Transition(QUEUED, counts="losses"),
    (LEASED, "failed"): Transition(QUEUED, counts="failures"),
    (LEASED, "stale"): Transition(QUEUED, counts="times_stale"),
    (LEASED, "prompt gone"): TO_DEAD,
    (READY, "stale"): REQUEUE._replace(counts="times_stale"),
    **{(READY, cause): REQUEUE for cause in ("abandoned", "damaged")},
    (READY, "assigned"): Transition(ASSIGNED, keeps_samples=True),
    (ASSIGNED, "trained"): Transition(COMMITTED, keeps_samples=True, outcome="trained"),
    (ASSIGNED, "damaged"): REQUEUE,
    (ASSIGNED, "rejected"): REQUEUE._replace(counts="failures"),
    **{(phase, "rewound"): Transition(READY, keeps_samples=True) for phase in (ASSIGNED, COMMITTED)},
    **{(phase, "dropped"): TO_DROPPED for phase in (QUEUED, LEASED, READY, ASSIGNED)},
}
"""(phase, cause) -> what becomes of it."""


def apply_transition(state: State, group: Group, cause: str, reason: str = "") -> None:
    """Carry out what follows from a cause; counted by `reason`, or else the cause. Raises SlimebusError `illegal_transition`."""
    transition, reason = counted_transition(state, group, cause), one_line(reason or cause)
    if transition.phase == DEAD and (counter := TRANSITIONS[group.phase, cause].counts) in ("losses", "times_stale"):
        reason = f"{reason} ({getattr(group, counter)} times{' in a row' if counter == 'losses' else ''})"
    if transition.outcome:
        prompts.report_outcome(state, group, transition.outcome, reason)
    if not transition.keeps_samples:
        state.forget_samples(group, reason)
    if not transition.keeps_partial:
        state.waste_partial(group, reason)
    if cause == "stale" and group.phase == LEASED:
        state.leases.remember(group.lease.id, "surplus")
    state.move(group, transition.phase, reason)
    if transition.phase in (DROPPED, DEAD):
        _end_group(state, group, reason)
    elif cause == "rewound" and group.drop_reason:  # somebody dropped it while the trainer had it
        apply_transition(state, group, "dropped", group.drop_reason)


def counted_transition(state: State, group: Group, cause: str) -> Transition:
    """The row of the table, its counter raised; death once that is at its limit."""
    transition = TRANSITIONS.get((group.phase, cause))
    if transition is None:
        text = f"group {group.id}: {group.phase} knows no {cause!r}; this process saw {state.phases_of(group)}; it is {state.now:.3f} s now"
        raise SlimebusError(text, code="illegal_transition")
    if not transition.counts:
        return transition
    count = state.groups.increment(group, transition.counts)
    limit = state.rules.max_attempts * (1 if transition.counts == "failures" else LOSS_LIMIT_FACTOR)
    return TO_DEAD if count >= limit else transition


def _end_group(state: State, group: Group, reason: str) -> None:
    state.end(group, reason)
    if group.phase == DROPPED:
        state.delete("prompts", group.id)
    else:
        what = f"is dead after {group.failures} failed attempts" if group.failures else "is dead"
        state.note(f"group {group.id} {what}; the last reason: {group.reason}", is_warning=True)

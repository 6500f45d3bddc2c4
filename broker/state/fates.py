"""What becomes of a group: one row for each thing that can happen to it in each phase, and one function that carries it out.

Three counters of a group end in its death: `failures` after max_attempts; `losses` (workers that vanished with it, in a row) and
`times_stale` after LOSS_LIMIT_FACTOR x max_attempts. A worker that is killed or restarted says little about its groups, so it takes more of
them; a prompt that kills each of its workers, or is too stale each time it is done, ends all the same.
"""

from typing import NamedTuple

from broker.state.broker_state import MAX_ENDED_REASON_CHARS, State
from broker.state.groups import ASSIGNED, COMMITTED, DEAD, DROPPED, LEASED, QUEUED, READY, Group, Phase
from slimebus.bus.envelope import one_line
from slimebus.bus.errors import SlimebusError

LOSS_LIMIT_FACTOR = 3
"""Of max_attempts: what a group may lose its workers, or be too stale, in a row."""


class Fate(NamedTuple):
    """The next phase; the counter that rises; whether samples and a partial are kept; the outcome that a stateful source learns."""

    phase: Phase
    counts: str = ""
    keeps_samples: bool = False
    keeps_partial: bool = True
    outcome: str = ""


DROP = Fate(DROPPED, keeps_partial=False, outcome="dropped")
DIE = Fate(DEAD, keeps_partial=False, outcome="dead")
RESAMPLE = Fate(QUEUED, outcome="requeued")

FATES: dict[tuple[Phase, str], Fate] = {
    (QUEUED, "leased"): Fate(LEASED),
    (LEASED, "put"): Fate(READY, keeps_samples=True),
    (LEASED, "returned"): Fate(QUEUED),
    (LEASED, "worker left"): Fate(QUEUED),
    (LEASED, "worker lost"): Fate(QUEUED, counts="losses"),
    (LEASED, "failed"): Fate(QUEUED, counts="failures"),
    (LEASED, "stale"): Fate(QUEUED, counts="times_stale"),
    (LEASED, "abandoned"): Fate(QUEUED),
    (LEASED, "damaged"): Fate(QUEUED),
    (LEASED, "prompt gone"): DIE,
    (READY, "stale"): RESAMPLE._replace(counts="times_stale"),
    (READY, "abandoned"): RESAMPLE,
    (READY, "damaged"): RESAMPLE,
    (READY, "assigned"): Fate(ASSIGNED, keeps_samples=True),
    (ASSIGNED, "trained"): Fate(COMMITTED, keeps_samples=True, outcome="trained"),
    (ASSIGNED, "damaged"): RESAMPLE,
    (ASSIGNED, "rejected"): RESAMPLE._replace(counts="failures"),
    (ASSIGNED, "rewound"): Fate(READY, keeps_samples=True),
    (COMMITTED, "rewound"): Fate(READY, keeps_samples=True),
    **{(phase, "dropped"): DROP for phase in (QUEUED, LEASED, READY, ASSIGNED)},
}
"""(phase, cause) -> what becomes of it."""


def become(state: State, group: Group, cause: str, reason: str = "") -> None:
    """Carry out what follows from a cause; counted by `reason`, or else the cause. Raises SlimebusError `illegal_transition`."""
    fate, reason = fate_of(state, group, cause), one_line(reason or cause)
    if fate.phase == DEAD and (counter := FATES[group.phase, cause].counts) in ("losses", "times_stale"):
        reason = f"{reason} ({getattr(group, counter)} times{' in a row' if counter == 'losses' else ''})"
    if fate.outcome:
        state.report_outcome(group, fate.outcome, reason)
    if not fate.keeps_samples:
        state.forget_samples(group, reason)
    if not fate.keeps_partial:
        state.waste_partial(group, reason)
    if cause == "stale" and group.phase == LEASED:
        state.remember_lease(group.lease.id, "surplus")
    state.move(group, fate.phase, reason)
    if fate.phase in (DROPPED, DEAD):
        _end(state, group, fate.phase, reason)
    elif fate.phase == QUEUED:
        group.step, group.rewards = -1, []
    elif cause == "rewound":
        group.step = -1
        if group.drop_reason:  # somebody dropped it while the trainer had it
            become(state, group, "dropped", group.drop_reason)


def fate_of(state: State, group: Group, cause: str) -> Fate:
    """The row of the table, its counter raised; death once that is at its limit."""
    fate = FATES.get((group.phase, cause))
    if fate is None:
        raise SlimebusError(f"group {group.id}: {group.phase} knows no {cause!r}", code="illegal_transition")
    if not fate.counts:
        return fate
    count = getattr(group, fate.counts) + 1
    setattr(group, fate.counts, count)
    limit = state.rules.max_attempts * (1 if fate.counts == "failures" else LOSS_LIMIT_FACTOR)
    return DIE if count >= limit else fate


def _end(state: State, group: Group, phase: Phase, reason: str) -> None:
    """Take a group out of play; its record is kept."""
    state.groups.remove(group)
    group.reason = reason[:MAX_ENDED_REASON_CHARS]
    state.meta.next_ended += 1
    group.ended = state.meta.next_ended
    state.keep_ended(group)
    state.tally(state.meta.ended, phase)
    if phase == DROPPED:
        state.delete("prompts", group.id)
    else:
        what = f"is dead after {group.failures} failed attempts" if group.failures else "is dead"
        state.note(f"group {group.id} {what}; the last reason: {group.reason}", is_warning=True)

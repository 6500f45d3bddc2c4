"""Which groups a batch gets.

    enough ready? -> worth waiting for some in flight? -> the buffer filter's choice, or first in, first out

A batch is `batch_size` groups; with `batch_tokens` it is as many groups as hold at most so many tokens, at least one. Whoever chooses,
only groups that are fresh enough are offered.
"""

from collections.abc import Sequence

from broker.state import admission, staleness
from broker.state.buffer_filter import BatchWanted, checked, describe
from broker.state.groups import LEASED, Group
from broker.state.rules import MAX_BATCH_SIZE
from broker.state.table import State
from slimebus.errors import HookError


def choose(state: State, step: int, now: float) -> list[Group]:
    """The groups for `step`; none while there are too few, or while some are waited for."""
    if not is_enough(state):
        state.end_wait()
        return []
    if _waits(state, step, now):
        return []
    state.end_wait()
    ready = _by_age(state) if state.rules.on_stale == "wait" else state.groups.first_ready(len(state.groups.ready))
    return _filtered(state, step, ready) or _first_of(state, ready)


def is_enough(state: State) -> bool:
    """True when what is ready fills a batch."""
    rules, num_ready = state.rules, len(state.groups.ready)
    if not rules.batch_tokens:
        return num_ready >= rules.batch_size
    return state.groups.ready_tokens >= rules.batch_tokens or num_ready >= MAX_BATCH_SIZE or (num_ready > 0 and _is_full(state))


def so_far(state: State, num_ready: int) -> str:
    """`3 of 16 groups`, or `3 groups of 512 of 4096 tokens`."""
    rules = state.rules
    if rules.batch_tokens:
        return f"{num_ready} groups of {state.groups.ready_tokens} of {rules.batch_tokens} tokens"
    return f"{num_ready} of {rules.batch_size} groups"


def _is_full(state: State) -> bool:
    """No group is in flight and there is no room for another: more tokens cannot come."""
    return state.groups.count(LEASED) == 0 and not state.groups.held and state.num_held >= admission.capacity(state)


def _first_of(state: State, ready: list[Group]) -> list[Group]:
    limit = state.rules.batch_tokens
    return ready[: state.rules.batch_size] if not limit else ready[: _num_fitting(ready, limit)]


def _num_fitting(groups: Sequence[Group], max_tokens: int) -> int:
    """How many of these, in order, hold at most so many tokens together; at least one."""
    total = 0
    for count, group in enumerate(groups[:MAX_BATCH_SIZE]):
        total += group.num_tokens
        if total > max_tokens and count:
            return count
    return min(len(groups), MAX_BATCH_SIZE)


# --- waiting for what would grow too old ---


def _waits(state: State, step: int, now: float) -> bool:
    if state.rules.on_stale != "wait" or state.rules.is_unbounded:
        return False
    if state.wait is not None and state.wait[0] == step and now >= state.wait[1]:
        return False
    if not staleness.saved_by_waiting(state, step, max(1, round(admission.groups_per_batch(state)))):
        return False
    if state.wait is None or state.wait[0] != step:
        state.wait = (step, now + state.rules.stale_wait_s)
        state.timers.set(("stale wait",), state.wait[1])
    return True


def stop_waiting(state: State) -> None:
    """A full batch has waited for long enough; what is still in flight may grow too old."""
    if state.wait is not None:
        state.tally(state.meta.counted, "batches that waited in vain")
        state.note(
            f"batch {state.wait[0]} waited {state.rules.stale_wait_s:g} s for groups in flight and goes without them", is_warning=True
        )


def _by_age(state: State) -> list[Group]:
    """Ready groups, the earliest deadline first, then the earliest admitted."""
    return sorted(state.groups.first_ready(len(state.groups.ready)), key=lambda g: staleness.last_step(state, g.oldest_version))


# --- the buffer filter ---


def _filtered(state: State, step: int, ready: list[Group]) -> list[Group]:
    """What the buffer filter chooses; nothing without one, or, counted and logged, when its answer is not a batch."""
    if state.buffer_filter is None:
        return []
    rules, version = state.rules, state.version_of(step)
    size = 0 if rules.batch_tokens else rules.batch_size
    wanted = BatchWanted(step=step, version=version, num_groups=size, num_tokens=rules.batch_tokens)
    try:
        return checked(state.buffer_filter([describe(group, version) for group in ready], wanted), ready, wanted)
    except HookError as bad:
        state.tally(state.meta.counted, "buffer filter answers refused")
        state.note(f"{bad.text}; batch {step} is chosen first in, first out instead", is_warning=True)
        return []

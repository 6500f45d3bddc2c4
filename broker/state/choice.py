"""Which groups a batch gets.

    enough ready? -> the buffer filter's choice, or first in, first out

A batch is `batch_size` groups; with `batch_tokens` it is as many groups as hold at most so many tokens, at least one. Whoever chooses,
only groups that are fresh enough are offered.
"""

import itertools
from collections.abc import Sequence

from broker.state import admission, prompts
from broker.state.broker_state import State
from broker.state.groups import LEASED, QUEUED, READY, Group
from broker.state.records import BatchWanted
from slimebus.bus.errors import HookError
from slimebus.bus.messages import MAX_BATCH_SIZE


def choose_groups(state: State, step: int) -> list[Group]:
    """The groups for `step`; none while there are too few."""
    if not is_enough(state):
        return []
    ready = list(state.groups.ready)
    return _filtered(state, step, ready) or ready[: _num_fitting(state, ready)]


def is_enough(state: State) -> bool:
    """True when what is ready fills a batch."""
    rules, num_ready = state.rules, len(state.groups.ready)
    if not rules.batch_tokens:
        return num_ready >= num_wanted(state)
    if num_ready >= MAX_BATCH_SIZE or state.groups.ready_tokens >= rules.batch_tokens:
        return True
    is_full = not state.groups.count(LEASED) and not state.groups.awaiting_fields and state.num_in_flight >= admission.capacity(state)
    return num_ready > 0 and is_full  # no group is in flight and there is no room for another: more tokens cannot come


def num_wanted(state: State) -> int:
    """How many groups must be ready before the next batch is chosen: a batch, or with `fill_first` all that may be before a first one."""
    rules, first = state.rules, state.meta.base_step
    if not rules.fill_first or state.next_unassigned > first or prompts.has_ended(state):
        return rules.batch_size
    ahead = (int(rules.max_staleness) + 1) * rules.publish_interval - first % rules.publish_interval  # steps of a version end at multiples
    left = ahead if rules.num_steps is None else max(1, rules.num_steps - first)
    return min(min(ahead, left) * rules.batch_size, admission.capacity(state))


def can_never_fill(state: State) -> bool:
    """True when the source has ended and what is left is less than a batch."""
    if not prompts.has_ended(state):
        return False
    waiting = state.groups.count(QUEUED) + state.groups.count(LEASED)
    if waiting and (state.rules.batch_tokens or state.stateful is not None):
        return False  # what becomes of them may make a stateful source give more
    if state.rules.batch_tokens:
        return not state.groups.awaiting_fields
    return waiting + state.groups.count(READY) < state.rules.batch_size


def describe_ready(state: State, num_ready: int) -> str:
    """`3 of 16 groups`, or `3 groups of 512 of 4096 tokens`."""
    rules = state.rules
    if rules.batch_tokens:
        return f"{num_ready} groups of {state.groups.ready_tokens} of {rules.batch_tokens} tokens"
    return f"{num_ready} of {num_wanted(state)} groups"


def _num_fitting(state: State, ready: Sequence[Group]) -> int:
    """How many of these make a batch, in order; with `batch_tokens` those that hold at most so many together, at least one."""
    max_tokens = state.rules.batch_tokens
    if not max_tokens:
        return state.rules.batch_size
    sums = itertools.accumulate(group.num_tokens for group in ready[:MAX_BATCH_SIZE])
    return max(1, sum(total <= max_tokens for total in sums))


def _filtered(state: State, step: int, ready: list[Group]) -> list[Group]:
    """What the buffer filter chooses; nothing without one, or, counted and logged, when its answer is not a batch."""
    if state.buffer_filter is None:
        return []
    rules = state.rules
    size = 0 if rules.batch_tokens else rules.batch_size
    wanted = BatchWanted(step=step, version=state.version_of(step), num_groups=size, num_tokens=rules.batch_tokens)
    try:
        return state.buffer_filter(ready, wanted)
    except HookError as bad:
        state.tally(state.meta.counted, "buffer filter answers refused")
        state.note(f"{bad.text}; batch {step} is chosen first in, first out instead", is_warning=True)
        return []

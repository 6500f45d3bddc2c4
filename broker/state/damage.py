"""What becomes of a group whose stored record is found damaged or missing: tried again from its prompt, never handed out.

A step that lost a group is chosen anew: its other groups, and those of the steps chosen after it, are ready again.
"""

from broker.state import partials
from broker.state.groups import ASSIGNED, DEAD, LEASED, READY
from broker.state.table import State

LOST_SAMPLES = "its stored samples are damaged"
LOST_PROMPT = "its stored prompt is damaged"


def lose_samples(state: State, group_id: str) -> None:
    """The samples of a ready or assigned group cannot be read: its prompt is queued again. Others have nothing to lose."""
    group = state.groups.by_id.get(group_id)
    if group is None or group.phase not in (READY, ASSIGNED):
        return
    state.note(f"group {group_id}: {LOST_SAMPLES}; its prompt is sampled again", is_warning=True)
    if group.phase == ASSIGNED:
        first = group.step
        state.requeue(group, LOST_SAMPLES)
        _choose_anew(state, first)
    else:
        state.requeue(group, LOST_SAMPLES)


def _choose_anew(state: State, step: int) -> None:
    state.meta.pace_step, state.meta.pace_version = step, state.version_of(step)  # the version it trains stays what was said
    for later in sorted(s for s, record in state.steps.items() if s >= step and not record.is_committed):
        record = state.steps.pop(later)
        state.changed("steps", later)
        for group_id in record.groups:
            group = state.groups.by_id.get(group_id)
            if group is not None and group.phase == ASSIGNED and group.step == later:
                group.step = -1
                state.move(group, READY, "its step lost a damaged group")


def lose_partial(state: State, group_id: str) -> None:
    """What a leaving worker had begun cannot be read: the group is sampled from its prompt alone."""
    group = state.groups.by_id.get(group_id)
    if group is not None and group.partial_frames:
        partials.waste(state, group, "stored partial is damaged")
        state.changed("groups", group_id)


def lose_prompt(state: State, group_id: str) -> None:
    """The prompt of a leased group cannot be read: taken from the source again, or dead where the source does not know it."""
    group = state.groups.by_id.get(group_id)
    if group is None or group.phase != LEASED:
        return
    prompt = state.source.find(group_id)
    if prompt is None:
        state.end(group, DEAD, LOST_PROMPT)
        return
    state.save("prompts", group_id, prompt.record)
    state.note(f"group {group_id}: {LOST_PROMPT}; it is read from the source again", is_warning=True)
    state.requeue(group, LOST_PROMPT)

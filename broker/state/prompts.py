"""Where the next prompt comes from, and what is kept of prompts that only came once.

Pushed prompts go before those of the source: first what was pushed to the front, then what was pushed, each in its order. Ids:

    push/17, front/3    pushed, by number
    import/0/42         from a file of exported groups, or of prompts
    hook/41             given by a stateful source
    0/42                of files: the source finds them again

The records of the first three kinds are nowhere but in the store. They are kept when their samples are freed, for a trainer may still go
back behind its checkpoint, until the step that trained them is KEPT_STEPS behind the newest checkpoint.
"""

from broker.state import archive
from broker.state.groups import Group
from broker.state.table import Prompt, State
from slimebus.errors import SlimebusError

FRONT, PUSH, HOOK, IMPORT = "front", "push", "hook", "import"
LANES = (FRONT, PUSH)
FIRST_POSITION = {FRONT: -(1 << 62), PUSH: -(1 << 61), IMPORT: -(1 << 60), HOOK: 0}
"""Queued prompts are leased by position, lowest first."""
KEPT_STEPS = 1000
RETRY_S = 1.0
"""Pause before a source that failed, or had nothing to give, is asked again."""


def draw(state: State) -> Group | None:
    """A group for the next prompt, None when there is none now. What was drawn is kept in the same transaction."""
    return _draw_pushed(state) or _draw_from_source(state)


def _draw_pushed(state: State) -> Group | None:
    for lane in LANES:
        first, end = state.meta.pushed[lane]
        if first < end:
            state.meta.pushed[lane] = (first + 1, end)
            group = Group(id=f"{lane}/{first}", position=FIRST_POSITION[lane] + first)
            state.groups.add(group)
            state.changed("groups", group.id)
            state.tally(state.meta.moves, "source>queued pushed")
            return group
    return None


def _draw_from_source(state: State) -> Group | None:
    prompt = _take(state)
    if prompt is None:
        return None
    state.meta.cursor += 1
    group = Group(id=prompt.id, position=prompt.position)
    state.groups.add(group)
    state.changed("groups", group.id)
    state.tally(state.meta.moves, "source>queued drawn")
    state.save("prompts", group.id, prompt.record)
    return group


def _take(state: State) -> Prompt | None:
    """The next prompt of the source. One that fails is asked again a second later, and the run waits for it meanwhile."""
    if state.now < state.source_rests_until:
        return None
    try:
        prompt = state.source.take(state.meta.cursor)
    except SlimebusError as bad:
        if bad.text != state.source_problem:
            state.note(f"no prompt can be drawn: {bad.text}", is_warning=True)
        state.tally(state.meta.counted, "prompt source failed")
        state.source_problem = bad.text
        _rest(state)
        return None
    state.source_problem = ""
    state.meta.source_ended = prompt is None
    if prompt is None and state.stateful is not None:
        _rest(state)
    return prompt


def _rest(state: State) -> None:
    state.source_rests_until = state.now + RETRY_S
    state.timers.set(("source",), state.source_rests_until)


def num_waiting(state: State) -> int:
    """Pushed prompts that no group was made of yet."""
    return sum(end - first for first, end in state.meta.pushed.values())


def has_ended(state: State) -> bool:
    """True when no prompt is left and none will come."""
    if num_waiting(state) or state.rules.waits_for_push:
        return False
    if not state.meta.source_ended and state.stateful is None:
        return _take(state) is None and state.meta.source_ended  # the same position gives the same prompt again
    return state.meta.source_ended


def why_none(state: State) -> str:
    """Why no prompt can be had although there is room; empty when there is no reason."""
    if state.source_problem:
        return f"no prompt can be drawn: {state.source_problem}"
    if not state.meta.source_ended or num_waiting(state):
        return ""
    if state.rules.waits_for_push:
        return "every prompt was drawn; waiting for prompts to be pushed (slimebus push)"
    return "the prompt source has ended"


# --- prompts that came once ---


def comes_once(group_id: str) -> bool:
    """True for a prompt whose record is only in the store."""
    return group_id.partition("/")[0] in FIRST_POSITION


def free(state: State, group_id: str) -> None:
    """The samples of this group are freed: let go of its record too, unless it is needed to go back."""
    if not comes_once(group_id):
        state.delete("prompts", group_id)


def forget_old(state: State, first: int, stop: int) -> None:
    """The steps of [first, stop) are freed: let go of the records kept for the steps KEPT_STEPS before them."""
    first, stop = first - KEPT_STEPS, stop - KEPT_STEPS
    for step in [*archive.steps(state, first, stop), *sorted(s for s in state.steps if first <= s < stop)]:
        record = state.step_record(step)
        for group_id in record.groups if record else ():
            if comes_once(group_id) and group_id not in state.groups.by_id:
                state.delete("prompts", group_id)


def is_forgotten(state: State, group_id: str, step: int) -> bool:
    """True when the record of a freed group of `step` is kept no more."""
    return comes_once(group_id) and step < state.meta.floor - KEPT_STEPS


def bring_back(state: State, group_id: str) -> bool:
    """Queue the prompt of a freed group again; False when the source does not know it any more."""
    if comes_once(group_id):
        lane, _, number = group_id.partition("/")
        position = FIRST_POSITION[lane] + (0 if lane == IMPORT else int(number))
        _queue(state, Group(id=group_id, position=position, reason="rewound"))
        return True
    try:
        prompt = state.source.find(group_id)
    except SlimebusError as bad:
        state.note(f"group {group_id}: {bad.text}", is_warning=True)
        return False
    if prompt is None:
        return False
    _queue(state, Group(id=prompt.id, position=prompt.position, reason="rewound"))
    state.save("prompts", prompt.id, prompt.record)
    return True


def _queue(state: State, group: Group) -> None:
    state.groups.add(group)
    state.changed("groups", group.id)
    state.tally(state.meta.moves, "freed>queued rewound")

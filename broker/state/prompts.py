"""Where the next prompt comes from, and what is kept of prompts that only came once.

Pushed prompts go before those of the source: first what was pushed to the front, then what was pushed, each in its order. Ids:

    push/17, front/3    pushed, by number
    import/0/42         from a file of exported groups, or of prompts
    hook/41             given by a stateful source
    0/42                of files: the source finds them again

The records of the first three kinds are nowhere but in the store, where they are kept as long as their samples.
"""

from broker.state.broker_state import State
from broker.state.groups import TRAIN, Group
from broker.state.prompt_source import Prompt
from slimebus.bus.errors import SlimebusError

FRONT, PUSH, HOOK, IMPORT = "front", "push", "hook", "import"
LANES = (FRONT, PUSH)
FIRST_POSITION = {FRONT: -(1 << 62), PUSH: -(1 << 61), IMPORT: -(1 << 60), HOOK: 0}
"""Queued prompts are leased by position, lowest first."""
RETRY_S = 1.0
"""Pause before a source that failed, or had nothing to give, is asked again."""


def draw_group(state: State) -> Group | None:
    """A group for the next prompt, None when there is none now. What was drawn is kept in the same transaction."""
    return _draw_pushed(state) or _draw_from_source(state)


def _draw_pushed(state: State) -> Group | None:
    for lane in LANES:
        first, end = state.meta.pushed[lane]
        if first < end:
            state.meta.pushed[lane] = (first + 1, end)
            return state.enter(Group(id=f"{lane}/{first}", position=FIRST_POSITION[lane] + first), "source>queued pushed")
    return None


def _draw_from_source(state: State) -> Group | None:
    prompt = _take_from_source(state)
    if prompt is None:
        return None
    state.meta.cursor += 1
    state.save("prompts", prompt.id, prompt.record)
    return state.enter(Group(id=prompt.id, position=prompt.position), "source>queued drawn")


def _take_from_source(state: State) -> Prompt | None:
    """The next prompt of the source. One that fails is asked again a second later, and the run waits for it meanwhile."""
    if state.now < state.source_rests_until or not _may_have_more(state):
        return None
    try:
        prompt = state.source.take(state.meta.cursor)
    except SlimebusError as bad:
        if bad.text != state.source_problem:
            state.note(f"no prompt can be drawn: {bad.text}", is_warning=True)
        state.tally(state.meta.counted, "prompt source failed")
        state.source_problem = bad.text
        _pause_source(state)
        return None
    state.source_problem = ""
    state.meta.source_ended = prompt is None
    if prompt is None and state.stateful is not None:
        _pause_source(state)
    return prompt


def may_draw(state: State) -> bool:
    """False when `draw_group` gives none for sure."""
    return num_waiting(state) > 0 or (state.now >= state.source_rests_until and _may_have_more(state))


def _may_have_more(state: State) -> bool:
    return state.stateful is not None or not state.meta.source_ended


def _pause_source(state: State) -> None:
    state.source_rests_until = state.now + RETRY_S
    state.timers.set(("source", None), state.source_rests_until)


def num_waiting(state: State) -> int:
    """Pushed prompts that no group was made of yet."""
    return sum(end - first for first, end in state.meta.pushed.values())


def has_ended(state: State) -> bool:
    """True when no prompt is left and none will come."""
    if num_waiting(state) or state.rules.waits_for_push:
        return False
    if not state.meta.source_ended and state.stateful is None:
        return _take_from_source(state) is None and state.meta.source_ended  # the same position gives the same prompt again
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


def is_only_in_store(group_id: str) -> bool:
    """True for a prompt with a record in the store alone."""
    return group_id.partition("/")[0] in FIRST_POSITION


def find_prompt(state: State, group_id: str) -> Prompt | None:
    """The prompt of a group as the source gives it again; None, with the reason in the log, where it does not."""
    if is_only_in_store(group_id):
        return None
    try:
        return state.source.find(group_id)
    except SlimebusError as bad:
        state.note(f"group {group_id}: {bad.text}", is_warning=True)
        return None


def free_prompt(state: State, group_id: str) -> None:
    """The samples of this group are freed, its record with them."""
    state.meta.num_freed_once += is_only_in_store(group_id)
    state.delete("prompts", group_id)


def begin_anew(state: State) -> None:
    """A trainer begins the run again behind what is freed: every prompt that the source gives again is new."""
    if state.stateful is None:
        for group in [g for g in state.groups.by_id.values() if g.kind == TRAIN and not is_only_in_store(g.id)]:
            state.retire(group, "the run begins anew")
        for group in [g for groups in state.ended.values() for g in groups.values() if not is_only_in_store(g.id)]:
            state.forget_ended(group)
            state.meta.ended[group.phase] -= 1
        state.meta.cursor, state.meta.source_ended = 0, False
    if state.meta.num_freed_once:
        text = f"{state.meta.num_freed_once} prompts that came once (pushed, imported or from a source hook) were trained and freed"
        state.note(f"{text}; they are not sampled again", is_warning=True)
        state.tally(state.meta.counted, "prompts lost in a rewind", state.meta.num_freed_once)
        state.meta.num_freed_once = 0

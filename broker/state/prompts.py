"""Where the next prompt comes from, what is kept of prompts that only came once, and what a source learns of them.

Pushed prompts go before those of the source: first what was pushed to the front, then what was pushed, each in its order. Ids:

    push/17, front/3    pushed, by number
    import/0/42         from a file of exported groups, or of prompts
    hook/41             given by a stateful source
    0/42                of files: the source finds them again

The records of the first three kinds are nowhere but in the store, where they are kept as long as their samples. A push is durable before it
is acknowledged; each key adds its prompts once.
"""

import msgspec
import xxhash

from broker.state.broker_state import MAX_REASON_CHARS, State
from broker.state.effects import Event
from broker.state.groups import TRAIN, Group
from broker.state.prompt_source import GroupResult, Prompt
from broker.state.records import PushRecord
from slimebus.bus.envelope import check_name
from slimebus.bus.errors import DataError, ProtocolError, SlimebusError
from slimebus.bus.messages import Push, PushReply
from slimebus.prompts.prompt_record import check_record

FRONT, PUSH, HOOK, IMPORT = "front", "push", "hook", "import"
LANES = (FRONT, PUSH)
FIRST_POSITION = {FRONT: -(1 << 62), PUSH: -(1 << 61), IMPORT: -(1 << 60), HOOK: 0}
"""Queued prompts are leased by position, lowest first."""
RETRY_S = 1.0
"""Pause before a source that failed, or had nothing to give, is asked again."""
MAX_PROMPTS = 4096
"""Of one push."""
MAX_BYTES = 64 * 1024 * 1024
"""The same, of all its prompts together."""
MAX_KEYS = 65_536
"""Pushes that a repeat is recognised of; beyond that the oldest key is forgotten."""


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
        state.meta.cursor, state.meta.source_ended = 0, False
    if state.meta.num_freed_once:
        text = f"{state.meta.num_freed_once} prompts that came once (pushed, imported or from a source hook) were trained and freed"
        state.note(f"{text}; they are not sampled again", is_warning=True)
        state.tally(state.meta.counted, "prompts lost in a rewind", state.meta.num_freed_once)
        state.meta.num_freed_once = 0


def skip(state: State, count: int) -> None:
    """The first prompts of the source were trained before this broker had any record."""
    state.meta.cursor = count


def report_outcome(state: State, group: Group, outcome: str, reason: str) -> None:
    """Have a stateful source know what became of a group that it gave: each attempt once, and each end."""
    if state.stateful is None or not group.id.startswith(f"{HOOK}/"):
        return
    if group.reported_lease == group.lease.id and outcome in ("trained", "requeued"):
        return
    state.groups.mark_reported(group)
    reason, step = ("", group.step) if outcome == "trained" else (reason[:MAX_REASON_CHARS], -1)
    lease, rewards = group.lease.id, group.rewards
    state.stateful.feedback(GroupResult(id=group.id, attempt=lease, outcome=outcome, reason=reason, rewards=rewards, step=step))
    state.meta.source_ended, state.source_rests_until = False, 0.0  # it may have something now


# --- pushed prompts ---


def push(state: State, event: Event, ask: Push) -> None:
    """Take in prompts behind all that were pushed before, or with `front` before those that were not. A repeated key adds nothing."""
    _check(event, ask)
    records = [bytes(record) for record in event.bulk]
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(records))
    known = state.pushes.get(ask.key)
    if known is not None and (known.digest, known.count) != (digest, len(records)):
        raise SlimebusError(f"push: key {ask.key!r} was used for {known.count} other prompts; choose another key", code="push_key")
    made = known or _accept(state, ask, records, digest)
    duplicate = 0 if known is None else made.count
    first, waiting = f"{made.lane}/{made.first}", num_waiting(state)
    state.reply(event.to, PushReply(accepted=made.count - duplicate, duplicate=duplicate, first=first, waiting=waiting))


def _check(event: Event, ask: Push) -> None:
    check_name("push: key", ask.key)
    if not 0 < len(event.bulk) <= MAX_PROMPTS:
        raise ProtocolError(f"push: {len(event.bulk)} prompts; expected 1 to {MAX_PROMPTS}, one bulk frame each")
    if (size_bytes := sum(map(len, event.bulk))) > MAX_BYTES:
        raise SlimebusError(f"push: {size_bytes} bytes of prompts at once, at most {MAX_BYTES}; push fewer", code="too_large")
    for number, record in enumerate(event.bulk):
        try:
            check_record(record)
        except DataError as bad:
            raise ProtocolError(f"push: prompt {number}: {bad.text}") from None


def _accept(state: State, ask: Push, records: list[bytes], digest: str) -> PushRecord:
    if state.meta.finishing:
        raise SlimebusError("push: the run is finished; nothing more will be sampled", code="finished")
    waiting, most = num_waiting(state), state.rules.max_pushed
    if len(records) > most:
        raise SlimebusError(f"push: {len(records)} prompts at once, at most {most} may wait (max_pushed); push fewer", code="too_large")
    if waiting + len(records) > most:
        text = f"push: {waiting} pushed prompts wait to be sampled; {len(records)} more would be above {most}"
        raise state.busy("max_pushed", text)
    lane = FRONT if ask.front else PUSH
    first, end = state.meta.pushed[lane]
    state.meta.pushed[lane] = (first, end + len(records))
    for number, record in enumerate(records, end):
        state.save("prompts", f"{lane}/{number}", record)
    state.meta.num_pushes += 1
    known = PushRecord(key=ask.key, serial=state.meta.num_pushes, digest=digest, lane=lane, first=end, count=len(records))
    state.keep_latest("pushes", known, MAX_KEYS)
    state.tally(state.meta.counted, "prompts pushed", len(records))
    return known

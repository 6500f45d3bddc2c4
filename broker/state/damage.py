"""What becomes of a group with a damaged record, or that the trainer rejects: tried again from its prompt, never handed out.

A step that lost a group is chosen anew: its other groups, and those of the steps chosen after it, are ready again.
"""

from typing import Any

import msgspec

from broker.state import batches, evaluation, prompts, transitions
from broker.state.broker_state import MAX_REASON_CHARS, State
from broker.state.effects import Event, Table
from broker.state.groups import ASSIGNED, COMMITTED, EVAL, LEASED, QUEUED, READY, Group
from broker.state.records import ROWS
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Ok, Reject

LOST_SAMPLES = "its stored samples are damaged"
LOST_PROMPT = "its stored prompt is damaged"
LOST_ROW = "its stored record is damaged"


def decode_row(table: str, key: str, value: bytes | SlimebusError) -> Any:
    """A stored row. Raises SlimebusError, msgspec.DecodeError or UnicodeDecodeError for one that is damaged."""
    if isinstance(value, SlimebusError):
        raise value
    if table not in ROWS:
        return value
    rows = ROWS[table]
    record = msgspec.msgpack.decode(value, type=rows.kind)
    name = str(getattr(record, rows.key)) if rows.key else key
    if name != key:
        raise SlimebusError(f"its record is that of {name!r}", code="damaged", retryable=True)
    return record


def recover_rows(state: State, lost: list[tuple[Table, str, str]]) -> None:
    """A starting broker found rows damaged, as (table, key, why): what needs them is made again or let go, named and counted."""
    for table, key, why in sorted(lost, key=lambda row: row[0] != "steps"):  # a lost group is looked for in the steps
        state.tally(state.meta.counted, f"damaged rows of {table}")
        state.note(f"row {key!r} of table {table!r} cannot be used: {why}; {ROWS[table].cost}", is_warning=True)
        # written again where it is made again, else deleted
        state.changed(table, int(key) if table == "steps" and key.isdecimal() else key)
        if table == "steps":
            batches.recover_step(state, key)
        elif table == "groups":
            _lose_group(state, key)
        elif table == "ended" and key not in state.groups.by_id:
            state.delete("prompts", key)
    for group in [g for g in state.groups.by_id.values() if g.kind == EVAL and g.evaluation not in state.evaluations]:
        state.retire(group, "its evaluation is damaged")


def _lose_group(state: State, group_id: str) -> None:
    """A group of a step stays in it, so that the step can be committed: a trainer that fetches it finds its samples damaged."""
    if group_id.startswith("eval/"):
        evaluation.recover_group(state, group_id, LOST_ROW)
    elif state.find_ended(group_id) is None:
        prompt = prompts.find_prompt(state, group_id)
        record = next((record for record in state.steps.values() if group_id in record.groups), None)
        phase = QUEUED if record is None else COMMITTED if record.is_committed else ASSIGNED
        group = Group(id=group_id, position=prompt.position if prompt else 0, phase=phase, step=record.step if record else -1)
        if record is None:
            state.delete("payloads", group_id)
        state.delete("partials", group_id)
        state.enter(group, f"lost>{group.phase} {LOST_ROW}")


def recover_record(state: State, table: str, key: str) -> None:
    """A record of a group was found damaged or missing: it is made again from what is whole."""
    group = state.groups.by_id.get(key.partition("\n")[0])
    if group is None:
        return
    if table in ("payloads", "fields"):
        _lose_samples(state, group)
    elif table == "prompts":
        _lose_prompt(state, group)
    elif table == "partials":
        state.waste_partial(group, "stored partial is damaged")


def _lose_samples(state: State, group: Group) -> None:
    """The samples of a ready or assigned group cannot be read: its prompt is queued again. Others have nothing to lose."""
    if group.phase not in (READY, ASSIGNED):
        return
    state.note(f"group {group.id}: {LOST_SAMPLES}; its prompt is sampled again", is_warning=True)
    step = group.step
    transitions.apply_transition(state, group, "damaged", LOST_SAMPLES)
    choose_anew(state, step)


def _lose_prompt(state: State, group: Group) -> None:
    """The prompt of a leased group cannot be read: taken from the source again, or dead where the source does not know it."""
    if group.phase != LEASED:
        return
    prompt = prompts.find_prompt(state, group.id)
    if prompt is None:
        transitions.apply_transition(state, group, "prompt gone", LOST_PROMPT)
        return
    state.save("prompts", group.id, prompt.record)
    state.note(f"group {group.id}: {LOST_PROMPT}; it is read from the source again", is_warning=True)
    transitions.apply_transition(state, group, "damaged", LOST_PROMPT)


def reject(state: State, event: Event, request: Reject) -> None:
    """The trainer cannot train some groups of a step: a failed attempt each, and the step gets others. A repeat changes nothing."""
    number = (event.epoch, event.to.request)
    if number > state.meta.last_reject:
        if request.step < state.meta.next_step:
            raise SlimebusError(
                f"reject of groups of step {request.step}; it is committed, the next is {state.meta.next_step}", code="step"
            )
        state.meta.last_reject = number
        named = state.steps[request.step].groups if request.step in state.steps else []
        bad = [state.groups.by_id[name] for name in request.groups if name in named]
        for group in bad:
            _reject(state, group, request.groups[group.id])
        if bad:
            choose_anew(state, request.step)
    state.reply(event.to, Ok())


def _reject(state: State, group: Group, reason: str) -> None:
    worker = group.lease.worker
    state.note(f"group {group.id} of worker {worker} was rejected by the trainer: {reason[:MAX_REASON_CHARS]}", is_warning=True)
    state.tally(state.meta.counted, f"rejected, of worker {worker}")
    if group.drop_reason:
        transitions.apply_transition(state, group, "dropped", group.drop_reason)
    else:
        transitions.apply_transition(state, group, "rejected", f"rejected: {reason}")


def choose_anew(state: State, step: int) -> None:
    """The groups of a step that is not committed, and of later ones, are ready again; no step: nothing."""
    if step in state.steps and not state.steps[step].is_committed:
        state.set_pace(step, state.version_of(step))  # the version it trains stays what was said
        batches.reopen(state, step, "its step is chosen anew", ASSIGNED)

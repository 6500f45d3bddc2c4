"""Groups changed by hand: dropped, revived, taken in from a file. Each is counted by reason like any other move."""

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.state import damage, evaluation, leases, prompts, staleness, transitions
from broker.state.broker_state import State
from broker.state.effects import Event
from broker.state.groups import COMMITTED, DROPPED, EVAL, READY, Group, LeaseRecord, version_range
from slimebus.bus.errors import DataError, ProtocolError, SlimebusError
from slimebus.bus.messages import MAX_GROUP_BYTES, NO_VERSION, Edit, EditReply, Import
from slimebus.bus.sample_table import BadSamples, CheckedGroup, check_group
from slimebus.prompts.prompt_record import check_record

IMPORTED = f"{prompts.IMPORT}/"
"""How the id of every imported group begins: no source gives such an id, so none of its prompts is trained twice."""
REPLAYED = "replayed"
FINISHED = "the run is finished, nothing more is sampled or trained; a larger rollout.num_rollout extends it"


def edit(state: State, event: Event, request: Edit) -> None:
    """Drop or replay groups; those for which that cannot be are answered with the reason and left alone."""
    reply = EditReply()
    for name in dict.fromkeys(request.groups):
        try:
            reply.done[name] = _drop_group(state, name, request.reason) if request.action == "drop" else _replay_group(state, name)
        except _CannotBe as refusal:
            reply.refused[name] = str(refusal)
    if reply.done:
        state.note(f"{event.who}: {request.action} of {len(reply.done)} groups: {', '.join(reply.done)}")
    state.reply(event.to, reply)


class _CannotBe(Exception):
    """Why a group is left alone."""


def _drop_group(state: State, name: str, reason: str) -> str:
    group = state.groups.by_id.get(name)
    if group is None:
        return _drop_ended(state, name)
    why, step = f"by hand: {reason}" if reason else "by hand", group.step
    if group.kind == EVAL:
        evaluation.give_up_group(state, group, why)
        return "given up; its samples count as failed"
    if group.phase == COMMITTED or step in state.fetched_steps:
        state.groups.drop_later(group, why)
        state.changed("groups", name)
        return f"step {step} has its samples: it is dropped if the trainer goes back before that step, or rejects it"
    transitions.apply_transition(state, group, "dropped", why)
    damage.choose_anew(state, step)
    return "dropped"


def _drop_ended(state: State, name: str) -> str:
    group = _find_ended(state, name)
    if group.phase == DROPPED:
        return "dropped already"
    state.tally(state.meta.moves, "dead>dropped by hand")
    state.forget_ended(group)
    state.keep_ended(msgspec.structs.replace(group, phase=DROPPED))
    return "dropped"


def _find_ended(state: State, name: str) -> Group:
    ended = state.find_ended(name)
    if ended is None:
        raise _CannotBe("unknown")
    return ended


def _replay_group(state: State, name: str) -> str:
    if (group := state.groups.by_id.get(name)) is not None:
        if group.reason != REPLAYED:
            raise _CannotBe(f"it is {group.phase}; only dead and dropped groups are replayed")
        return "queued"
    if state.meta.finishing:
        raise _CannotBe(FINISHED)
    ended = _find_ended(state, name)
    if ended.phase == DROPPED:  # its prompt was not kept
        prompt = prompts.find_prompt(state, name)
        if prompt is None:
            raise _CannotBe("its prompt was not kept, and the source does not give it")
        state.save("prompts", name, prompt.record)
    state.enter(Group(id=name, position=ended.position, reason=REPLAYED), f"{ended.phase}>queued replayed")
    state.forget_ended(ended)
    return "queued"


# --- import ---


def import_group(state: State, event: Event, request: Import) -> None:
    """Take in a group: ready with its samples where this run could have made them, else queued with its prompt."""
    made = _check_imported_samples(state, request, event.bulk)
    known = state.groups.by_id.get(request.group) or state.find_ended(request.group)
    if known is not None:
        state.reply(event.to, EditReply(done={request.group: f"here already: {known.phase}"}))
        return
    if state.meta.finishing:
        raise SlimebusError(f"import: {FINISHED}", code="finished")
    state.save("prompts", request.group, bytes(event.bulk[0]))
    why = _why_without(state, request, made) if made else ""
    group = Group(id=request.group, position=prompts.FIRST_POSITION[prompts.IMPORT], reason="imported")
    if made and not why:
        lease = LeaseRecord(leases.next_number(state), lineage=request.lineage)
        group = msgspec.structs.replace(group, phase=READY, lease=lease, put_lease=lease.id)
        state.groups.describe(group, made, 0)
        state.save("payloads", group.id, made.frames)
    state.enter(group, f"import>{group.phase}")
    if group.phase == READY:
        state.make_readable(group)
    state.note(f"{event.who}: import of group {group.id}: {group.phase}")
    state.reply(event.to, EditReply(done={request.group: f"{group.phase}{f': {why}' if why else ''}"}))


def _check_imported_samples(state: State, request: Import, bulk: Sequence[Any]) -> CheckedGroup | None:
    """The samples of an import; None where it has none that are worth training."""
    if not request.group.startswith(IMPORTED) or len(request.group.encode()) > MAX_GROUP_BYTES:
        raise ProtocolError(f"import: group {request.group[:64]!r}; expected at most {MAX_GROUP_BYTES} bytes that begin with {IMPORTED!r}")
    if not bulk:
        raise ProtocolError(f"import of {request.group[:64]}: no prompt record in bulk frame 0")
    try:
        check_record(bulk[0])
        made = check_group(bulk[1:], max_bytes=state.max_message_bytes) if len(bulk) > 1 else None
    except (DataError, BadSamples) as bad:
        raise ProtocolError(f"import of {request.group[:64]}: {bad.text}") from None
    return made if made is not None and not all(s.has_failed for s in made.samples) else None


def _why_without(state: State, request: Import, made: CheckedGroup) -> str:
    """Why the samples cannot be trained here; empty when they can."""
    oldest, newest = version_range(made.samples)
    if newest != NO_VERSION and request.lineage != state.meta.lineage:
        return f"its samples are of lineage {request.lineage[:8] or 'none'}, not of this run's"
    if newest > state.meta.version:
        return f"its samples are of version {newest}, newer than {state.meta.version}"
    if staleness.is_stale(state, Group(id="", position=0, oldest_version=oldest), state.next_unassigned):
        return f"its samples of version {oldest} are too stale"
    return ""

"""Groups changed by hand: dropped, revived, taken in from a file. Each is counted by reason like any other move."""

from collections.abc import Sequence
from typing import Any

import msgspec

from broker.state import leases, prompts, staleness
from broker.state.clients import check_is_client
from broker.state.effects import Event
from broker.state.groups import DEAD, DROPPED, EVAL, LEASED, QUEUED, READY, Group
from broker.state.table import State
from slimebus.errors import DataError, ProtocolError
from slimebus.messages import NO_VERSION, Edit, EditReply, Import, Put
from slimebus.prompt_record import check_record

IMPORTED = f"{prompts.IMPORT}/"
"""How the id of every imported group begins: no source gives such an id, so none of its prompts is trained twice."""
MAX_ID_BYTES = 256
REPLAYED = "replayed"


def edit(state: State, event: Event, ask: Edit) -> None:
    """Drop or replay groups; those for which that cannot be are answered with the reason and left alone."""
    check_is_client(state, event, "groups by hand")
    if ask.action not in ("drop", "replay"):
        raise ProtocolError(f"edit: action {ask.action[:64]!r}; expected drop or replay")
    reply = EditReply()
    for name in dict.fromkeys(ask.groups):
        refusal, result = _drop(state, name, ask.reason) if ask.action == "drop" else _replay(state, name)
        if refusal:
            reply.refused[name] = refusal
        else:
            reply.done[name] = result
    state.reply(event.to, reply)


def _drop(state: State, name: str, reason: str) -> tuple[str, str]:
    group = state.groups.by_id.get(name)
    if group is None:
        return _drop_ended(state, name)
    if group.kind == EVAL:
        return "it belongs to an evaluation", ""
    if group.phase not in (QUEUED, LEASED, READY):
        return f"it is {group.phase}, of step {group.step}: the trainer has it", ""
    state.drop(group, f"by hand: {reason}" if reason else "by hand")
    return "", "dropped"


def _drop_ended(state: State, name: str) -> tuple[str, str]:
    group = _ended(state, name)
    if group is None:
        return "unknown", ""
    if group.phase == DEAD:
        _count_ended(state, group, DROPPED, "dead>dropped by hand")
        group.phase = DROPPED
        state.save("ended", name, msgspec.msgpack.encode(group))
        state.delete("prompts", name)
    return "", "dropped"


def _replay(state: State, name: str) -> tuple[str, str]:
    if (group := state.groups.by_id.get(name)) is not None:
        return (f"it is {group.phase}; only dead and dropped groups are replayed", "") if group.reason != REPLAYED else ("", "queued")
    ended = _ended(state, name)
    if ended is None:
        return "unknown", ""
    if ended.phase == DROPPED:  # its prompt was not kept
        prompt = None if prompts.comes_once(name) else state.source.find(name)
        if prompt is None:
            return "its prompt was not kept, and the source does not know it", ""
        state.save("prompts", name, prompt.record)
    _count_ended(state, ended, "", f"{ended.phase}>queued replayed")
    revived = Group(id=name, position=ended.position, attempt=ended.attempt, put_attempt=ended.put_attempt, reason=REPLAYED)
    state.groups.add(revived)
    state.changed("groups", name)
    state.delete("ended", name)
    return "", "queued"


def _ended(state: State, name: str) -> Group | None:
    found = state.read("ended", name) if len(name.encode()) <= MAX_ID_BYTES else None
    return None if found is None else msgspec.msgpack.decode(found, type=Group)


def _count_ended(state: State, group: Group, phase: str, move: str) -> None:
    state.meta.ended[group.phase] = state.meta.ended.get(group.phase, 0) - 1
    if phase:
        state.tally(state.meta.ended, phase)
    state.tally(state.meta.moves, move)


# --- import ---


def take_in(state: State, event: Event, ask: Import) -> None:
    """Take in a group: ready with its samples where this run could have made them, else queued with its prompt."""
    check_is_client(state, event, "groups by hand")
    _check_import(ask, event.bulk)
    known = state.groups.by_id.get(ask.group) or _ended(state, ask.group)
    if known is not None:
        state.reply(event.to, EditReply(done={ask.group: f"here already: {known.phase}"}))
        return
    group = Group(id=ask.group, position=prompts.FIRST_POSITION[prompts.IMPORT], reason="imported")
    state.save("prompts", group.id, bytes(event.bulk[0]))
    good = leases.good_of(ask.samples)
    why = _why_without(state, ask) if good else ""
    if good and not why:
        _add_ready(state, event, group, ask)
    else:
        state.groups.add(group)
    state.changed("groups", group.id)
    state.tally(state.meta.moves, f"import>{group.phase}")
    state.reply(event.to, EditReply(done={ask.group: f"{group.phase}{f': {why}' if why else ''}"}))


def _check_import(ask: Import, bulk: Sequence[Any]) -> None:
    if not ask.group.startswith(IMPORTED) or len(ask.group.encode()) > MAX_ID_BYTES:
        raise ProtocolError(f"import: group {ask.group[:64]!r}; expected at most {MAX_ID_BYTES} bytes that begin with {IMPORTED!r}")
    if not bulk:
        raise ProtocolError(f"import of {ask.group[:64]}: no prompt record in bulk frame 0")
    leases.check_samples(_as_put(ask), len(bulk) - 1)
    try:
        check_record(bulk[0])
    except DataError as bad:
        raise ProtocolError(f"import of {ask.group[:64]}: {bad.text}") from None


def _why_without(state: State, ask: Import) -> str:
    """Why the samples cannot be trained here; empty when they can."""
    newest = max((version for s in ask.samples for version, _ in s.versions), default=NO_VERSION)
    oldest = min((s.oldest_version for s in ask.samples if s.oldest_version != NO_VERSION), default=NO_VERSION)
    if newest != NO_VERSION and ask.lineage != state.meta.lineage:
        return f"its samples are of lineage {ask.lineage[:8] or 'none'}, not of this run's"
    if newest > state.meta.version:
        return f"its samples are of version {newest}, newer than {state.meta.version}"
    if staleness.is_stale(state, Group(id="", position=0, oldest_version=oldest), state.next_unassigned):
        return f"its samples of version {oldest} are too stale"
    return ""


def _add_ready(state: State, event: Event, group: Group, ask: Import) -> None:
    group.attempt = group.put_attempt = 1
    group.admitted = state.meta.next_admitted
    state.meta.next_admitted += 1
    group.lineage = ask.lineage
    header = msgspec.msgpack.encode(_as_put(ask))
    frames = [header, *event.bulk[1:]]
    leases.describe(group, _as_put(ask))
    group.num_frames, group.size_bytes = len(frames), sum(map(len, frames))
    group.phase = READY
    state.groups.add(group)
    state.groups.arrive(group, state.meta.next_arrival)
    state.meta.next_arrival += 1
    state.save("payloads", group.id, frames)


def _as_put(ask: Import) -> Put:
    return Put(group=ask.group, lease=0, attempt=1, lineage=ask.lineage, samples=ask.samples, fields=ask.fields)

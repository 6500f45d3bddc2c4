"""Consumers: services beside the trainer that read the same groups, each at its own pace, and may put fields of their own to them.

    put accepted -> position 1, 2, 3, ...        read(after=p): the next groups behind p; p and all before it are acknowledged

A consumer takes nothing from the trainer and is waited for only where `required_fields` says so. What it reads may be gone when it
comes to it (trained and freed, requeued, dropped): such positions are skipped and counted in the reply. A group that is sampled again has
a new attempt and a new position.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from broker.state.broker_state import State
from broker.state.clients import is_present, is_silent, note_end_told
from broker.state.effects import Event, StoredPayload
from broker.state.groups import ASSIGNED, COMMITTED, READY, Group, LateField, field_key
from broker.state.records import ConsumerRecord
from slimebus.bus.errors import ProtocolError, SlimebusError
from slimebus.bus.messages import Field, PutFields, PutFieldsReply, Read, ReadGroup, ReadReply
from slimebus.bus.sample_table import MAX_FIELDS, MAX_LATE_FIELDS, TOKEN_FIELDS, BadSamples, decode_fields, field_bytes

MAX_CONSUMERS = 64
MAX_READ_GROUPS = 64
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Of samples in one answer; a larger group comes alone."""
MAX_NAMES = 32


# --- reading ---


def read(state: State, event: Event, request: Read) -> None:
    """Answer with the next groups behind the cursor, now or when there are some. The same until they are acknowledged."""
    if request.shard >= request.shards:
        raise ProtocolError(f"read: shard {request.shard} of {request.shards}; expected 0 <= shard < shards")
    consumer, name = consumer_of(state, event.sender), event.sender
    _acknowledge(state, consumer, request)
    older = state.waiting_reads.get(name)
    if older is not None and older.to != event.to:
        state.answer(state.waiting_reads, name, ReadReply(position=consumer.position, reason="a newer read took its place"))
    state.waiting_reads.park(name, event, request, state.now)
    _answer_if_readable(state, name)
    if request.wait_s == 0:
        answer_timed_out(state, name)


def consumer_of(state: State, name: str) -> ConsumerRecord:
    """The durable record of a consumer. A new one begins at the oldest group that is kept. Raises SlimebusError `busy`."""
    found = state.consumers.get(name)
    if found is None:
        if len(state.consumers) >= MAX_CONSUMERS:
            _forget_one(state)
        oldest = next((g.read_position for g in state.groups.by_read_position), state.meta.next_read_position)
        found = state.consumers[name] = ConsumerRecord(name=name, position=oldest - 1)
        state.changed("consumers", name)
    return found


def _forget_one(state: State) -> None:
    """Make room: of the consumers that are not here, the one furthest behind goes; it would find least of what it has not read."""
    gone = [c for c in state.consumers.values() if (client := state.clients.get(c.name)) is None or not is_present(client)]
    if not gone:
        raise SlimebusError(f"{MAX_CONSUMERS} consumers take part already; stop one first", code="busy", retryable=True)
    last = min(gone, key=lambda c: c.position)
    del state.consumers[last.name]
    state.waiting_reads.take_out(last.name)  # it fell silent while it waited
    state.last_reads.pop(last.name, None)
    state.changed("consumers", last.name)
    state.note(f"consumer {last.name} is forgotten: {MAX_CONSUMERS} others came after it", is_warning=True)


def _acknowledge(state: State, consumer: ConsumerRecord, request: Read) -> None:
    """All before this position is read; or it is read again from there on."""
    after = request.after
    if after >= state.meta.next_read_position:
        text = f"read after position {after}, but the newest is {state.meta.next_read_position - 1}; the broker lost its folder: begin at 0"
        raise SlimebusError(text, code="position")
    if after == consumer.position or (after < consumer.position and not request.back):
        return
    last, num_read, num_skipped = state.last_reads.pop(consumer.name, (0, 0, 0))
    if after > consumer.position:
        consumer.num_read += num_read if last == after else after - consumer.position
        consumer.num_skipped += num_skipped if last == after else 0
    consumer.position = after
    state.changed("consumers", consumer.name)


def answer_waiting_reads(state: State) -> None:
    """Answer the reads that wait for what just arrived."""
    if state.waiting_reads and state.served_changes != state.groups.readable_changes:
        state.served_changes = state.groups.readable_changes
        for name in list(state.waiting_reads):
            _answer_if_readable(state, name)


def _answer_if_readable(state: State, name: str) -> None:
    request, consumer = state.waiting_reads[name].message, state.consumers[name]
    found = _next_groups(state, consumer, request)
    if not found:
        return
    last = found[-1].read_position
    num_skipped = _num_of_shard(consumer.position, last, request) - len(found)
    state.last_reads[name] = (last, len(found), num_skipped)
    only = None if request.extras is None else tuple(request.extras)
    groups = [_describe_group(group, only) for group in found]
    reply = ReadReply(groups=groups, position=consumer.position, num_skipped=num_skipped, finished=state.is_finished)
    _send_reply(state, name, reply, [payload_of(group, only) for group in found])


def _send_reply(state: State, name: str, reply: ReadReply, samples: Sequence[StoredPayload] = ()) -> None:
    if client := state.clients.get(name):
        note_end_told(client, state.waiting_reads[name].to.request, is_finished=reply.finished)
    state.answer(state.waiting_reads, name, reply, samples)


def _next_groups(state: State, consumer: ConsumerRecord, request: Read) -> list[Group]:
    """In order, and no further than the first that still lacks a needed field."""
    behind = state.groups.readable_after(consumer.position)
    of_shard = (group for group in behind if group.read_position % request.shards == request.shard)
    whole = itertools.takewhile(lambda group: has_fields(group, request.needs), of_shard)
    return within_one_answer(itertools.islice(whole, min(request.count, MAX_READ_GROUPS)))


def within_one_answer(groups: Iterable[Group]) -> list[Group]:
    """The first of these groups, as many as one answer holds: a group larger than that comes alone."""
    found: list[Group] = []
    size_bytes = 0
    for group in groups:
        size_bytes += group.size_bytes
        if found and size_bytes > MAX_ANSWER_BYTES:
            break
        found.append(group)
    return found


def _num_of_shard(after: int, last: int, request: Read) -> int:
    """Positions of the shard from the one behind `after` to `last`."""
    first = after + 1 + (request.shard - after - 1) % request.shards
    return max(0, (last - first) // request.shards + 1)


def has_fields(group: Group, names: list[str]) -> bool:
    """True when a group has all of these fields."""
    return TOKEN_FIELDS.keys() | {*group.fields, *group.late_names} >= set(names)


def _describe_group(group: Group, only: tuple[str, ...] | None) -> ReadGroup:
    sizes = {name: getattr(group, name) for name in ("num_samples", "num_tokens", "oldest_version")}
    return ReadGroup(group=group.id, lease=group.put_lease, position=group.read_position, num_frames=num_frames(group, only), **sizes)


def num_frames(group: Group, only: tuple[str, ...] | None = None) -> int:
    """Frames of a group's record: header, fields of the put, late fields. only: of the fields beyond the usual three, just these."""
    extras = [*group.fields, *group.late_names]
    wanted = len(extras) if only is None else sum(name in only for name in extras)
    return group.num_frames - len(group.fields) + wanted


def payload_of(group: Group, only: tuple[str, ...] | None = None) -> StoredPayload:
    """The frames of a group's record for a reply: as many as `num_frames` says."""
    late = tuple(Field(name=f.name, dtype=f.dtype, shapes=f.shapes) for f in group.late)
    return StoredPayload(group.id, group.num_frames, late, only)


def answer_timed_out(state: State, name: str) -> None:
    """Answer a read that waited to its end."""
    if name in state.waiting_reads:
        position, reason = state.consumers[name].position, why_waiting(state, name)
        _send_reply(state, name, ReadReply(position=position, reason=reason, finished=state.is_finished))


def why_waiting(state: State, name: str) -> str:
    """What a waiting read waits for."""
    needs, consumer = state.waiting_reads[name].message.needs, state.consumers[name]
    if state.is_finished:
        return "the run is finished"
    ahead = state.groups.readable_after(consumer.position)
    lacking = next((n for group in ahead for n in needs if not has_fields(group, [n])), "")
    return (
        f"{state.groups.num_readable_after(consumer.position)} groups lie ahead, the first lacks field {lacking!r}"
        if lacking
        else "no group behind its position yet"
    )


# --- late fields ---


def put_fields(state: State, event: Event, put: PutFields) -> None:
    """Add fields to a group that waits to be trained. A repeat is acknowledged; a field that is there is never replaced."""
    where = f"put_fields of group {put.group[:64]}"
    group, frames = state.groups.by_id.get(put.group), event.bulk[1:]
    try:
        fields = decode_fields(event.bulk)
        if group is None or group.put_lease != put.lease or group.phase not in (READY, ASSIGNED):
            state.tally(state.meta.counted, "late fields discarded", len(fields))
            state.reply(event.to, PutFieldsReply(result="gone", reason=_why_gone(group, put)))
            return
        late = [_check_late_field(group, field, frame, event.sender) for field, frame in zip(fields, frames, strict=True)]
    except BadSamples as bad:
        raise ProtocolError(f"{where}: {bad.text}") from None
    new = [i for i, field in enumerate(late) if _is_new(group, field)]
    size_bytes = group.size_bytes + sum(late[i].size_bytes for i in new)
    if state.max_message_bytes and size_bytes > state.max_message_bytes:
        text = f"{where}: it would have {size_bytes} bytes; at most {state.max_message_bytes} can be fetched (broker.max_message_mib)"
        raise SlimebusError(text, code="too_large")
    num_late = len(group.late) + len(new)
    num_fields = len(TOKEN_FIELDS) + len(group.fields) + num_late
    if num_late > MAX_LATE_FIELDS or num_fields > MAX_FIELDS:
        text = f"it would have {num_fields} fields, {num_late} of them late; at most {MAX_FIELDS} and {MAX_LATE_FIELDS}"
        raise ProtocolError(f"{where}: {text}")
    for i in new:
        state.save("fields", field_key(group.id, late[i].name), [frames[i]])
    if new:
        _add_late_fields(state, group, [late[i] for i in new], event.sender)
    is_late = group.phase == ASSIGNED and group.step in state.fetched_steps
    reason = f"the trainer has fetched step {group.step} already" if is_late and new else ""
    state.reply(event.to, PutFieldsReply(result="accepted" if new else "duplicate", reason=reason))


def _add_late_fields(state: State, group: Group, late: list[LateField], name: str) -> None:
    consumer = consumer_of(state, name)
    for field in late:
        if field.name in consumer.fields or len(consumer.fields) < MAX_NAMES:
            consumer.fields[field.name] = consumer.fields.get(field.name, 0) + 1
    state.changed("consumers", name)
    state.groups.add_fields(group, late)
    state.tally(state.meta.counted, "late fields", len(late))
    state.changed("groups", group.id)


def _why_gone(group: Group | None, put: PutFields) -> str:
    if group is None:
        return f"group {put.group[:64]} is not in play: trained and freed, dropped, or of another run"
    if group.put_lease == put.lease and group.phase == COMMITTED:
        return f"group {group.id} is trained already"
    return f"lease {put.lease} of group {group.id} has no samples any more (now: {group.phase}, {group.reason})"


def _check_late_field(group: Group, field: Field, frame: Any, by: str) -> LateField:
    """A field as it is kept. Raises BadSamples."""
    size_bytes = sum(field_bytes(field, group.lengths))
    if size_bytes != len(frame):
        raise BadSamples(f"field {field.name!r}: a frame of {len(frame)} bytes; its dtype and shapes make {size_bytes}")
    for i, (shape, length) in enumerate(zip(field.shapes, group.lengths, strict=False)):
        if shape and shape[0] not in (length, 1):
            text = f"shape {shape[:8]}; expected [{length}, ...] (one entry a token), [1, ...] or []"
            raise BadSamples(f"field {field.name!r}, sample {i}: {text}")
    digest = xxhash.xxh3_128_digest(frame)
    return LateField(name=field.name, by=by, digest=digest, shapes=field.shapes, dtype=field.dtype, size_bytes=size_bytes)


def _is_new(group: Group, field: LateField) -> bool:
    """False for a field that is there already. Raises SlimebusError `field_exists` where it would be replaced by someone else's."""
    there = next((f for f in group.late if f.name == field.name), None)
    if there is None and field.name not in group.fields and field.name not in TOKEN_FIELDS:
        return True
    if there is not None and (
        there.by == field.by or (there.digest, there.dtype, there.shapes) == (field.digest, field.dtype, field.shapes)
    ):
        return False  # the first value of a producer stays, also when a restarted one computes it a little differently
    owner = f"consumer {there.by}" if there is not None else "the worker that put its samples"
    raise SlimebusError(f"group {group.id} has a field {field.name!r} from {owner}; use another name", code="field_exists")


# --- who is waited for ---


def missing_fields(state: State) -> dict[str, int]:
    """Required fields that ready groups lack, and how many lack each."""
    waiting = state.groups.awaiting_fields.values()
    return dict(Counter(name for group in waiting for name in state.rules.required_fields if not has_fields(group, [name])))


def why_fields_are_awaited(state: State) -> str:
    """Which required fields ready groups still lack, and who used to put them; empty when none does."""
    return "; ".join(f"{count} wait for field {name!r}, {_who_puts(state, name)}" for name, count in missing_fields(state).items())


def producers(state: State, name: str) -> list[str]:
    """Consumers that have put a field."""
    return [c.name for c in state.consumers.values() if name in c.fields]


def _who_puts(state: State, name: str) -> str:
    words = []
    for producer in producers(state, name)[:4]:
        client = state.clients.get(producer)
        if client is None:
            producer += " (gone)"
        elif is_silent(state, client):
            producer += f" (silent for {state.now - client.heard_at:.0f} s)"
        words.append(producer)
    return f"put by {', '.join(words)}" if words else "which no consumer has put so far"


def status_rows(state: State) -> list[dict[str, Any]]:
    """Where each consumer stands, for the status."""
    return [
        {
            "name": one.name,
            "position": one.position,
            "behind": state.groups.num_readable_after(one.position),
            "read": one.num_read,
            "skipped": one.num_skipped,
            "silent_s": round(state.now - state.clients[one.name].heard_at, 3) if one.name in state.clients else None,
            "fields": one.fields,
        }
        for one in state.consumers.values()
    ]

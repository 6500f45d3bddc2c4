"""Consumers: services beside the trainer that read the same groups, each at its own pace, and may put fields of their own to them.

    put accepted -> position 1, 2, 3, ...        read(after=p): the next groups behind p; p and all before it are acknowledged

A consumer takes nothing from the trainer and is waited for only where `required_fields` says so. What it reads may be gone when it
comes to it (trained and freed, requeued, dropped): such positions are skipped, and it is told how many. A group that is sampled again has
a new attempt and a new position.
"""

from typing import Any

import xxhash

from broker.state.clients import is_present, is_silent
from broker.state.effects import Event, StoredPayload
from broker.state.groups import ASSIGNED, READY, Group, LateField, field_key
from broker.state.records import Client, Consumer, Parked
from broker.state.table import State
from broker.state.timers import bounded_wait
from slimebus.errors import ProtocolError, SlimebusError
from slimebus.messages import Field, PutFields, PutFieldsReply, Read, ReadGroup, ReadReply

MAX_CONSUMERS = 64
MAX_READ_GROUPS = 64
MAX_READ_BYTES = 64 * 1024 * 1024
"""Of one answer; a larger group comes alone."""
MAX_NAMES = 32
MAX_FIELD_CHARS = 64
MAX_DIMENSION = 1 << 31
TOKEN_FIELDS = ("tokens", "loss_mask", "rollout_logprobs")
ITEM_BYTES = {
    **dict.fromkeys(("uint8", "int8"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}


# --- reading ---


def read(state: State, event: Event, client: Client, ask: Read, now: float) -> None:
    """Answer with the next groups behind the cursor, now or when there are some. The same until they are acknowledged."""
    _check_read(ask)
    consumer = consumer_of(state, client.name)
    _acknowledge(state, consumer, ask.after)
    older = state.parked_reads.get(client.name)
    if older is not None and older.to != event.to:
        _answer(state, client.name, ReadReply(position=consumer.position, reason="a newer read took its place"))
    state.parked_reads[client.name] = Parked(to=event.to, client=client.name, message=ask)
    state.timers.set(("parked read", client.name), now + bounded_wait(ask.wait_s))
    _serve(state, client.name)
    if client.name in state.parked_reads and not ask.wait_s > 0:
        give_up(state, client.name)


def _check_read(ask: Read) -> None:
    names = [*ask.needs, *(ask.extras or ())]
    if ask.count < 1 or not 0 <= ask.shard < ask.shards:
        raise ProtocolError(
            f"read: count {ask.count}, shard {ask.shard} of {ask.shards}; expected a count of 1 or more, 0 <= shard < shards"
        )
    if len(names) > 2 * MAX_NAMES or any(len(name) > MAX_FIELD_CHARS for name in names):
        raise ProtocolError(f"read: at most {MAX_NAMES} names of at most {MAX_FIELD_CHARS} characters in needs and extras")


def consumer_of(state: State, name: str) -> Consumer:
    """The durable record of a consumer. A new one begins at the oldest group that is kept. Raises SlimebusError `busy`."""
    found = state.consumers.get(name)
    if found is None:
        if len(state.consumers) >= MAX_CONSUMERS:
            _forget_one(state)
        oldest = next((g.arrival for g in state.groups.arrivals.after(0)), state.meta.next_arrival)
        found = state.consumers[name] = Consumer(name=name, position=oldest - 1)
        state.changed("consumers", name)
    return found


def _forget_one(state: State) -> None:
    """Make room: of the consumers that are not here, the one furthest behind goes; it would find least of what it has not read."""
    gone = [c for c in state.consumers.values() if (client := state.clients.get(c.name)) is None or not is_present(client)]
    if not gone:
        raise SlimebusError(f"{MAX_CONSUMERS} consumers take part already; stop one first", code="busy", retryable=True)
    last = min(gone, key=lambda c: c.position)
    del state.consumers[last.name]
    state.changed("consumers", last.name)
    state.note(f"consumer {last.name} is forgotten: {MAX_CONSUMERS} others came after it", is_warning=True)


def _acknowledge(state: State, consumer: Consumer, after: int) -> None:
    if after >= state.meta.next_arrival:
        text = f"read after position {after}, but the newest is {state.meta.next_arrival - 1}; the broker lost its folder: begin at 0"
        raise SlimebusError(text, code="position")
    if after <= consumer.position:
        return
    last, num_read, num_skipped = state.last_reads.pop(consumer.name, (0, 0, 0))
    consumer.num_read += num_read if last == after else after - consumer.position
    consumer.num_skipped += num_skipped if last == after else 0
    consumer.position = after
    state.changed("consumers", consumer.name)


def serve(state: State) -> None:
    """Answer whoever waits for what just arrived."""
    if state.parked_reads and state.served_changes != state.groups.arrivals.changes:
        state.served_changes = state.groups.arrivals.changes
        for name in list(state.parked_reads):
            _serve(state, name)


def finish(state: State) -> None:
    """The run is over: nobody waits for more."""
    for name in list(state.parked_reads):
        give_up(state, name)


def _serve(state: State, name: str) -> None:
    ask, consumer = state.parked_reads[name].message, state.consumers[name]
    found = _next(state, consumer, ask)
    if not found:
        return
    last = found[-1].arrival
    num_skipped = _num_of_shard(consumer.position, last, ask) - len(found)
    state.last_reads[name] = (last, len(found), num_skipped)
    only = None if ask.extras is None else tuple(ask.extras)
    reply = ReadReply(
        groups=[_described(group, only) for group in found],
        position=consumer.position,
        num_skipped=num_skipped,
        finished=state.is_finished,
    )
    _answer(state, name, reply, [payload_of(group, only) for group in found])


def _next(state: State, consumer: Consumer, ask: Read) -> list[Group]:
    """In order, and no further than the first that still lacks a needed field."""
    found: list[Group] = []
    size_bytes = 0
    for group in state.groups.arrivals.after(consumer.position):
        if ask.shards > 1 and group.arrival % ask.shards != ask.shard:
            continue
        size_bytes += group.size_bytes
        if not has_fields(group, ask.needs) or (found and size_bytes > MAX_READ_BYTES):
            break
        found.append(group)
        if len(found) >= min(ask.count, MAX_READ_GROUPS):
            break
    return found


def _num_of_shard(after: int, last: int, ask: Read) -> int:
    """Positions of the shard from the one behind `after` to `last`."""
    first = after + 1 + (ask.shard - after - 1) % ask.shards
    return max(0, (last - first) // ask.shards + 1)


def has_fields(group: Group, names: list[str]) -> bool:
    """True when a group has all of these fields."""
    return all(n in TOKEN_FIELDS or n in group.fields or any(f.name == n for f in group.late) for n in names)


def _described(group: Group, only: tuple[str, ...] | None) -> ReadGroup:
    return ReadGroup(
        group=group.id,
        attempt=group.put_attempt,
        position=group.arrival,
        num_frames=num_frames(group, only),
        num_samples=group.num_samples,
        num_tokens=group.num_tokens,
        oldest_version=group.oldest_version,
    )


def num_frames(group: Group, only: tuple[str, ...] | None = None) -> int:
    """Frames of a group's record: header, fields of the put, late fields. only: of the fields beyond the usual three, just these."""
    extras = [*group.fields, *(f.name for f in group.late)]
    wanted = len(extras) if only is None else sum(name in only for name in extras)
    return group.num_frames - len(group.fields) + wanted


def payload_of(group: Group, only: tuple[str, ...] | None = None) -> StoredPayload:
    """The frames of a group's record for a reply: as many as `num_frames` says."""
    return StoredPayload(group.id, tuple(Field(name=f.name, dtype=f.dtype, shapes=f.shapes) for f in group.late), only)


def give_up(state: State, name: str) -> None:
    """Answer a parked read whose wait ran out."""
    if name in state.parked_reads:
        consumer = state.consumers[name]
        reason = why_parked(state, name)
        _answer(state, name, ReadReply(position=consumer.position, reason=reason, finished=state.is_finished))


def why_parked(state: State, name: str) -> str:
    """What a parked read waits for."""
    needs, consumer = state.parked_reads[name].message.needs, state.consumers[name]
    if state.is_finished:
        return "the run is finished"
    behind = state.groups.arrivals.num_after(consumer.position)
    lacking = next((n for g in state.groups.arrivals.after(consumer.position) for n in needs if not has_fields(g, [n])), "")
    return f"{behind} groups lie ahead, the first lacks field {lacking!r}" if lacking else "no group behind its position yet"


def _answer(state: State, name: str, reply: ReadReply, bulk: list[StoredPayload] | None = None) -> None:
    parked = state.parked_reads.pop(name)
    state.timers.cancel(("parked read", name))
    state.reply(parked.to, reply, list(bulk or ()))


# --- late fields ---


def put_fields(state: State, event: Event, client: Client, put: PutFields, max_message_bytes: int) -> None:
    """Add fields to a group that waits to be trained. A repeat is acknowledged; a field that is there is never replaced."""
    _check_names(put, len(event.bulk))
    group = state.groups.by_id.get(put.group)
    if group is None or group.put_attempt != put.attempt or group.phase not in (READY, ASSIGNED):
        state.tally(state.meta.counted, "late fields discarded", len(put.fields))
        state.reply(event.to, PutFieldsReply(result="gone", reason=_why_gone(group, put)))
        return
    late = [_checked(group, field, frame, client.name) for field, frame in zip(put.fields, event.bulk, strict=True)]
    new = [i for i, field in enumerate(late) if _is_new(group, field)]
    size_bytes = sum(late[i].size_bytes for i in new)
    if max_message_bytes and group.size_bytes + size_bytes > max_message_bytes:
        text = f"put_fields: group {group.id} would have {group.size_bytes + size_bytes} bytes; at most {max_message_bytes} can be fetched"
        raise SlimebusError(text, code="too_large")
    if len(group.late) + len(new) > MAX_NAMES:
        raise ProtocolError(f"put_fields: group {group.id} would have {len(group.late) + len(new)} late fields; at most {MAX_NAMES}")
    for i in new:
        state.save("fields", field_key(group.id, late[i].name), [event.bulk[i]])
    if new:
        _add(state, group, [late[i] for i in new], client.name)
    is_late = group.phase == ASSIGNED and group.step in state.pace.fetched
    reason = f"the trainer has fetched step {group.step} already" if is_late and new else ""
    state.reply(event.to, PutFieldsReply(result="accepted" if new else "duplicate", reason=reason))


def _add(state: State, group: Group, late: list[LateField], name: str) -> None:
    consumer = consumer_of(state, name)
    for field in late:
        if field.name in consumer.fields or len(consumer.fields) < MAX_NAMES:
            consumer.fields[field.name] = consumer.fields.get(field.name, 0) + 1
    state.changed("consumers", name)
    group.late = [*group.late, *late]
    group.size_bytes += sum(field.size_bytes for field in late)
    state.groups.completed(group)
    state.groups.arrivals.changes += 1
    state.tally(state.meta.counted, "late fields", len(late))
    state.changed("groups", group.id)


def _why_gone(group: Group | None, put: PutFields) -> str:
    if group is None:
        return f"group {put.group[:64]} is not in play: trained and freed, dropped, or of another run"
    if group.put_attempt == put.attempt and group.phase == "committed":
        return f"group {group.id} is trained already"
    return f"attempt {put.attempt} of group {group.id} has no samples any more (now: {group.phase}, {group.reason})"


def _check_names(put: PutFields, num_bulk: int) -> None:
    names = [field.name for field in put.fields]
    if num_bulk != len(names) or not names:
        raise ProtocolError(
            f"put_fields of group {put.group[:64]}: {num_bulk} bulk frames for {len(names)} fields; expected one for each, at least one"
        )
    if len(set(names)) < len(names) or len(names) > MAX_NAMES:
        raise ProtocolError(f"put_fields of group {put.group[:64]}: {len(names)} fields; expected at most {MAX_NAMES} of different names")
    for name in names:
        if not 0 < len(name) <= MAX_FIELD_CHARS or not name.isprintable() or not name.isascii():
            raise ProtocolError(
                f"put_fields of group {put.group[:64]}: field name {name[:80]!r}; expected 1 to {MAX_FIELD_CHARS} ASCII characters"
            )


def _checked(group: Group, field: Field, frame: Any, name: str) -> LateField:
    where = f"put_fields of group {group.id}, field {field.name!r}"
    if field.dtype not in ITEM_BYTES:
        raise ProtocolError(f"{where}: unknown dtype {field.dtype[:32]!r}; expected one of {', '.join(ITEM_BYTES)}")
    if len(field.shapes) != len(group.lengths):
        raise ProtocolError(f"{where}: {len(field.shapes)} shapes for {len(group.lengths)} samples (failed ones count too)")
    size_bytes = sum(_size(where, i, shape, group.lengths[i]) for i, shape in enumerate(field.shapes)) * ITEM_BYTES[field.dtype]
    given = len(memoryview(frame).cast("B"))
    if size_bytes != given:
        raise ProtocolError(f"{where}: frame of {given} bytes, its shapes say {size_bytes}")
    return LateField(
        name=field.name, by=name, digest=xxhash.xxh3_128_digest(frame), shapes=field.shapes, dtype=field.dtype, size_bytes=size_bytes
    )


def _size(where: str, i: int, shape: list[int], num_tokens: int) -> int:
    if shape and shape[0] not in (num_tokens, 1):
        raise ProtocolError(f"{where}, sample {i}: shape {shape[:8]}; expected [{num_tokens}, ...] (one entry a token), [1, ...] or []")
    total = 1
    for n in shape:
        if not 0 <= n <= MAX_DIMENSION:
            raise ProtocolError(f"{where}, sample {i}: a dimension of {n}; expected 0 to {MAX_DIMENSION}")
        total *= n
    return total


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


def why_held(state: State, now: float) -> str:
    """Which required fields ready groups still lack, and who used to put them; empty when none is held back."""
    missing: dict[str, int] = {}
    for group in state.groups.held.values():
        for name in state.rules.required_fields:
            if not has_fields(group, [name]):
                missing[name] = missing.get(name, 0) + 1
    return "; ".join(f"{count} wait for field {name!r}, {_who_puts(state, name, now)}" for name, count in missing.items())


def producers(state: State, name: str) -> list[str]:
    """Consumers that have put a field."""
    return [c.name for c in state.consumers.values() if name in c.fields]


def _who_puts(state: State, name: str, now: float) -> str:
    names = producers(state, name)
    if not names:
        return "which no consumer has put so far"
    words = []
    for one in names[:4]:
        client = state.clients.get(one)
        if client is None:
            one = f"{one} (gone)"
        elif is_silent(state, client, now):
            one = f"{one} (silent for {now - client.heard_at:.0f} s)"
        words.append(one)
    return f"put by {', '.join(words)}"


def rows(state: State, now: float) -> list[dict[str, Any]]:
    """Where each consumer stands, for the status."""
    found = []
    for one in state.consumers.values():
        client = state.clients.get(one.name)
        found.append(
            {
                "name": one.name,
                "position": one.position,
                "behind": state.groups.arrivals.num_after(one.position),
                "read": one.num_read,
                "skipped": one.num_skipped,
                "silent_s": None if client is None else round(now - client.heard_at, 3),
                "fields": one.fields,
            }
        )
    return found

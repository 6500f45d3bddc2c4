"""Prompts that a client pushes while the run goes on: durable before they are acknowledged, each key once, bounded."""

import xxhash

from broker.state import prompts
from broker.state.effects import Event
from broker.state.records import PushRecord
from broker.state.table import State
from slimebus.errors import DataError, ProtocolError, SlimebusError
from slimebus.messages import Push, PushReply
from slimebus.prompt_record import check_record

MAX_PROMPTS = 4096
"""Of one push."""
MAX_KEY_CHARS = 128
MAX_KEYS = 65_536
"""Pushes that a repeat is recognised of; beyond that the oldest key is forgotten."""


def push(state: State, event: Event, ask: Push) -> None:
    """Take in prompts behind all that were pushed before, or with `front` before those that were not. A repeated key adds nothing."""
    _check(event, ask)
    records = [bytes(record) for record in event.bulk]
    digest = _digest(records)
    known = state.pushes.get(ask.key)
    if known is not None and (known.digest, known.count) != (digest, len(records)):
        raise SlimebusError(f"push: key {ask.key!r} was used for {known.count} other prompts; choose another key", code="push_key")
    if known is None:
        known = _accept(state, ask, records, digest)
        state.reply(event.to, _reply(state, known, accepted=known.count))
    else:
        state.reply(event.to, _reply(state, known, accepted=0))


def _check(event: Event, ask: Push) -> None:
    if not 0 < len(ask.key) <= MAX_KEY_CHARS:
        raise ProtocolError(f"push: key must have 1 to {MAX_KEY_CHARS} characters")
    if not 0 < len(event.bulk) <= MAX_PROMPTS:
        raise ProtocolError(f"push: {len(event.bulk)} prompts; expected 1 to {MAX_PROMPTS}, one bulk frame each")
    for number, record in enumerate(event.bulk):
        try:
            check_record(record)
        except DataError as bad:
            raise ProtocolError(f"push: prompt {number}: {bad.text}") from None


def _accept(state: State, ask: Push, records: list[bytes], digest: str) -> PushRecord:
    if state.meta.finishing:
        raise SlimebusError("push: the run is finished; nothing more will be sampled", code="finished")
    waiting, most = prompts.num_waiting(state), state.rules.max_pushed
    if len(records) > most:
        raise SlimebusError(f"push: {len(records)} prompts at once, at most {most} may wait (max_pushed); push fewer", code="too_large")
    if waiting + len(records) > most:
        text = f"push: {waiting} pushed prompts wait to be sampled; {len(records)} more would be above {most} (max_pushed)"
        raise SlimebusError(text, code="busy", retryable=True)
    lane = prompts.FRONT if ask.front else prompts.PUSH
    first, end = state.meta.pushed[lane]
    state.meta.pushed[lane] = (first, end + len(records))
    for number, record in enumerate(records, end):
        state.save("prompts", f"{lane}/{number}", record)
    state.meta.num_pushes += 1
    known = PushRecord(key=ask.key, serial=state.meta.num_pushes, digest=digest, lane=lane, first=end, count=len(records))
    _remember(state, known)
    state.tally(state.meta.counted, "prompts pushed", len(records))
    return known


def _remember(state: State, known: PushRecord) -> None:
    state.pushes[known.key] = known
    state.changed("pushes", known.key)
    while len(state.pushes) > MAX_KEYS:
        oldest = next(iter(state.pushes))
        del state.pushes[oldest]
        state.changed("pushes", oldest)


def _reply(state: State, known: PushRecord, *, accepted: int) -> PushReply:
    return PushReply(
        accepted=accepted,
        duplicate=known.count - accepted,
        first=f"{known.lane}/{known.first}",
        waiting=prompts.num_waiting(state),
    )


def _digest(records: list[bytes]) -> str:
    digest = xxhash.xxh3_128()
    for record in records:
        digest.update(len(record).to_bytes(8, "little"))
        digest.update(record)
    return digest.hexdigest()


def restore(state: State, known: list[PushRecord]) -> None:
    """Take up the keys of the pushes so far."""
    state.pushes = {push.key: push for push in sorted(known, key=lambda push: push.serial)}

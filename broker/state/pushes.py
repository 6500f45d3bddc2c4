"""Prompts that a client pushes while the run goes on: durable before they are acknowledged, each key once, bounded."""

import msgspec
import xxhash

from broker.state import prompts
from broker.state.broker_state import State
from broker.state.effects import Event
from broker.state.records import PushRecord
from slimebus.bus.envelope import check_name
from slimebus.bus.errors import DataError, ProtocolError, SlimebusError
from slimebus.bus.messages import Push, PushReply
from slimebus.prompts.prompt_record import check_record

MAX_PROMPTS = 4096
"""Of one push."""
MAX_BYTES = 64 * 1024 * 1024
"""The same, of all its prompts together."""
MAX_KEYS = 65_536
"""Pushes that a repeat is recognised of; beyond that the oldest key is forgotten."""


def push(state: State, event: Event, request: Push) -> None:
    """Take in prompts behind all that were pushed before, or with `front` before those that were not. A repeated key adds nothing."""
    _check(event, request)
    records = [bytes(record) for record in event.bulk]
    digest = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(records))
    known = state.pushes.get(request.key)
    if known is not None and (known.digest, known.count) != (digest, len(records)):
        raise SlimebusError(f"push: key {request.key!r} was used for {known.count} other prompts; choose another key", code="push_key")
    made = known or _accept(state, request, records, digest)
    duplicate = 0 if known is None else made.count
    first, waiting = f"{made.lane}/{made.first}", prompts.num_waiting(state)
    state.reply(event.to, PushReply(accepted=made.count - duplicate, duplicate=duplicate, first=first, waiting=waiting))


def _check(event: Event, request: Push) -> None:
    check_name("push: key", request.key)
    if not 0 < len(event.bulk) <= MAX_PROMPTS:
        raise ProtocolError(f"push: {len(event.bulk)} prompts; expected 1 to {MAX_PROMPTS}, one bulk frame each")
    if (size_bytes := sum(map(len, event.bulk))) > MAX_BYTES:
        raise SlimebusError(f"push: {size_bytes} bytes of prompts at once, at most {MAX_BYTES}; push fewer", code="too_large")
    for number, record in enumerate(event.bulk):
        try:
            check_record(record)
        except DataError as bad:
            raise ProtocolError(f"push: prompt {number}: {bad.text}") from None


def _accept(state: State, request: Push, records: list[bytes], digest: str) -> PushRecord:
    if state.meta.finishing:
        raise SlimebusError("push: the run is finished; nothing more will be sampled", code="finished")
    waiting, most = prompts.num_waiting(state), state.rules.max_pushed
    if len(records) > most:
        raise SlimebusError(f"push: {len(records)} prompts at once, at most {most} may wait (max_pushed); push fewer", code="too_large")
    if waiting + len(records) > most:
        text = f"push: {waiting} pushed prompts wait to be sampled; {len(records)} more would be above {most}"
        raise state.busy("max_pushed", text)
    lane = prompts.FRONT if request.front else prompts.PUSH
    first, end = state.meta.pushed[lane]
    state.meta.pushed[lane] = (first, end + len(records))
    for number, record in enumerate(records, end):
        state.save("prompts", f"{lane}/{number}", record)
    state.meta.num_pushes += 1
    known = PushRecord(key=request.key, serial=state.meta.num_pushes, digest=digest, lane=lane, first=end, count=len(records))
    state.keep_latest("pushes", known, MAX_KEYS)
    state.tally(state.meta.counted, "prompts pushed", len(records))
    return known

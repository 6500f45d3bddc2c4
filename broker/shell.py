"""The broker process: sockets, disk and clock around the state machine.

    ROUTER --burst--> Machine --effects--> one commit --> replies --> hints (XPUB)

Nobody is answered before what the answer rests on is as durable as the store promises.
"""

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from broker.awake_clock import AwakeClock
from broker.guard import Guard, security
from broker.held import RETRY_S, SAY_AGAIN_S, Held
from broker.metrics_file import MetricsFile
from broker.payload import assembled
from broker.source import FileRows
from broker.state.bounds import bounds
from broker.state.buffer_filter import BufferFilter
from broker.state.effects import (
    Address,
    Bulk,
    Delete,
    Effect,
    EvalPrompt,
    Event,
    Inline,
    Note,
    Notify,
    Record,
    Reply,
    Save,
    StoredPartial,
    StoredPayload,
    StoredPrompt,
)
from broker.state.groups import field_key
from broker.state.machine import Machine
from broker.state.rules import Rules
from broker.state.table import PromptSource
from broker.store import Damaged, LmdbStore, Store, StoreError, Write
from broker.store.pages import damaged_store
from slimebus import envelope
from slimebus.clock import Clock, SystemClock
from slimebus.envelope import error_reply
from slimebus.errors import SlimebusError, UsageError
from slimebus.messages import Error, Field, Hint, Status
from slimebus.security.keyring import Keyring
from slimebus.transport.server import (
    DEFAULT_MAX_MESSAGE_BYTES,
    REBIND_S,
    Limits,
    Request,
    Server,
    bind_socket,
    has_input,
)

log = logging.getLogger("slimebus.broker")

T = TypeVar("T")
Writes = Mapping[tuple[str, str], Write]

MAX_IDLE_S = 0.5
"""How often a stop request is looked for; two wake-ups a second cost nothing."""
MAX_HINTS = 16
"""Hints that wait for a subscriber that reads none; more are dropped, as hints may be."""
SUBSCRIBE_ALL = b"\x01"
MAX_STRANGE_BYTES = 64 * 1024
"""Of subscriptions to anything but everything, which nobody has a use for."""
MAX_SUBSCRIPTION_BYTES = 4096
"""Of a subscription, and of the commands of a CURVE handshake, which have some hundred bytes."""
RESTORED_TABLES = ("meta", "clients", "steps", "evaluations", "consumers", "pushes", "source", "groups")


class Broker:
    """A bound broker with its state read back. `endpoint` and `hints_endpoint` are the addresses it got.

    eval_rows: the rows of each held-out set of `rules.eval_datasets`. metrics_path: JSON lines, one per trained step and result.
    limits: of the ROUTER. Raises UsageError for an address in use or a store of another run.
    """

    def __init__(
        self,
        rules: Rules,
        source: PromptSource,
        store: Store,
        *,
        run: str,
        bind: str = "tcp://127.0.0.1:0",
        hints_bind: str = "tcp://127.0.0.1:0",
        eval_rows: Mapping[str, FileRows] | None = None,
        clock: Clock | None = None,
        metrics_path: Path | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        limits: Limits | None = None,
        keyring: Keyring | None = None,
        buffer_filter: BufferFilter | None = None,
    ) -> None:
        self.store, self.clock, self.eval_rows = store, clock or SystemClock(), eval_rows or {}
        self.awake = AwakeClock(self.clock)
        self.metrics = MetricsFile(metrics_path, self.clock)
        self._held: Held | None = None
        self.server = Server(bind, run=run, name="broker", max_message_bytes=max_message_bytes, limits=limits, keyring=keyring)
        self.guard = Guard(self.server, keyring) if keyring is not None else None
        self.endpoint = self.server.endpoint
        try:
            self._open_hints(hints_bind)
            self.machine = self._restored(rules, source, run, max_message_bytes, buffer_filter)
        except UsageError:
            self.close()
            raise
        self.machine.outside = self._outside
        if isinstance(store, LmdbStore):
            store.announce(self.endpoint)
        meta = self.machine.state.meta
        self._last_hint = Hint(lineage=meta.lineage, version=meta.version, publishers=meta.publishers, digest=meta.digest)

    def _restored(
        self, rules: Rules, source: PromptSource, run: str, max_message_bytes: int, buffer_filter: BufferFilter | None
    ) -> Machine:
        machine = Machine(
            rules,
            source,
            run=run,
            hints=self.hints_endpoint,
            max_message_bytes=max_message_bytes,
            buffer_filter=buffer_filter,
            first_id=int(self.clock.wall() * 1000),  # a broker whose folder was lost gives no epoch or lease twice
            records=self.store.get,
        )
        rows = ((table, key, value) for table in RESTORED_TABLES for key, value in self.store.scan(table))
        gc.disable()  # a million groups are made here and none is garbage; looking for some doubles the time
        try:
            machine.restore(rows, self.awake.now)
        except (Damaged, msgspec.DecodeError) as bad:
            raise damaged_store(f"of run {run!r}", bad) from None
        finally:
            gc.enable()
        return machine

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, or the run is finished and everyone has left."""
        try:
            while not stop.is_set() and (self._held is not None or not self.machine.is_over):
                self.turn(MAX_IDLE_S)
        finally:
            self.close()

    def turn(self, max_wait_s: float) -> int:
        """One burst: receive, decide, commit, answer. Returns how many requests it had."""
        if self._held is not None:
            return self._turn_held(self._held)
        requests = self._admitted(self.server.receive(self._wait_s(max_wait_s)))
        now = self.awake.advance()
        effects: list[Effect] = []
        all_heard = len(requests) < self.server.burst
        if self.guard is not None:
            requests = self.guard.tell(requests)
            effects += self._mind_keys(self.guard, now)
        if requests:
            effects += self.machine.apply([event_of(request) for request in requests], now)
        deadline = self.machine.next_deadline()
        is_due = not requests or (deadline is not None and deadline <= now)
        if is_due and self.awake.is_time_to_judge(all_heard=all_heard):
            effects += self.machine.tick(now)
        self._perform(effects)
        self._greet_subscribers()
        return len(requests)

    def close(self) -> None:
        """Release addresses and store."""
        if self._held is not None:
            log.error("stopped with a store that cannot be written: what was not acknowledged will be asked again")
        self.metrics.flush()
        self._close_hints()
        self.server.close()
        self.store.close()

    def last_status(self) -> dict[str, Any]:
        """The status as it is now; also after close."""
        return self.machine.status(self.awake.advance())

    def _wait_s(self, max_wait_s: float) -> float:
        deadline = self.machine.next_deadline()
        return max_wait_s if deadline is None else min(max_wait_s, max(0.0, deadline - self.awake.advance()))

    # --- effects ---

    def _perform(self, effects: Sequence[Effect]) -> None:
        writes: dict[tuple[str, str], Write] = {}
        for effect in effects:
            if isinstance(effect, Save):
                writes[effect.table, effect.key] = Write(effect.table, effect.key, effect.value)
            elif isinstance(effect, Delete):
                writes[effect.table, effect.key] = Write(effect.table, effect.key, None)
        if self._held is not None:  # found while the burst before is said, and that found damage and a full disk at once
            self._held = self._held.with_more(writes, effects)
            return
        if writes:
            try:
                self.store.commit(list(writes.values()))
            except StoreError as bad:
                self._hold(writes, effects, bad)
                return
        for effect in effects:
            self._say(effect, writes)

    # --- a store that takes no more ---

    def _admitted(self, requests: list[Request]) -> list[Request]:
        """The requests that there is room for. Samples for which there is none are refused; what frees room always goes on."""
        size_bytes = sum(len(frame) for request in requests for frame in request.bulk)
        self._set_disk_full(self.store.refusal(size_bytes))
        if any(isinstance(request.message, Status) for request in requests):
            self.machine.state.store = self.store.report()
        return [r for r in requests if not r.bulk or self._has_room(r)] if self.machine.state.disk_full else requests

    def _has_room(self, request: Request) -> bool:
        text = self.store.refusal(sum(map(len, request.bulk)))
        if text:
            self.server.reply(request, Error(code="disk_full", text=text, retryable=True))
        return not text

    def _set_disk_full(self, text: str) -> None:
        was = self.machine.state.disk_full
        self.machine.state.disk_full = text
        if text and not was:
            log.error("%s; no samples are taken and no groups leased until then", text)
        elif was and not text:
            log.warning("the broker's store has room again; samples are taken and groups leased")

    def _hold(self, writes: Writes, effects: Sequence[Effect], problem: StoreError) -> None:
        """The state has changed and the store has not: nothing of it is said, and nothing else decided, until it is written."""
        now = self.clock.monotonic()
        self._held = Held(writes=writes, effects=effects, problem=problem, since=now, retry_at=now + RETRY_S, said_at=now)
        log.error("%s", problem.text)

    def _turn_held(self, held: Held) -> int:
        requests = self.server.receive(min(MAX_IDLE_S, max(0.0, held.retry_at - self.clock.monotonic())))
        now = self.clock.monotonic()
        self.awake.advance()
        self.machine.state.store = self.store.report() | held.report(now)
        for request in requests:
            self.server.reply(request, *self.machine.answer_held(event_of(request), self._last_hint, held.problem, self.awake.now))
        if now >= held.retry_at:
            self._retry(held, now)
        return len(requests)

    def _retry(self, held: Held, now: float) -> None:
        try:
            self.store.commit(list(held.writes.values()))
        except StoreError as bad:
            if bad.code != held.problem.code or now >= held.said_at + SAY_AGAIN_S:
                log.error("still, for %.0f s: %s", now - held.since, bad.text)
                held.said_at = now
            held.problem, held.retry_at = bad, now + RETRY_S
            return
        self._held = None
        self.machine.state.store = self.store.report()
        log.warning("the broker's store is written again after %.1f s; nothing was lost", now - held.since)
        for effect in held.effects:
            self._say(effect, held.writes)

    def _say(self, effect: Effect, writes: Writes) -> None:
        if isinstance(effect, Reply):
            self._reply(effect, writes)
        elif isinstance(effect, Notify):
            self._hint(effect.hint)
        elif isinstance(effect, Note):
            log.log(logging.WARNING if effect.is_warning else logging.INFO, "%s", effect.text)
        elif isinstance(effect, Record):
            self.metrics.add(effect.row)

    def _reply(self, reply: Reply, writes: Writes) -> None:
        try:
            bulk = [frame for part in reply.bulk for frame in self._frames(part, writes)]
        except Damaged as bad:
            log.error("%s", bad.text)
            self._perform(self.machine.damaged(bad.table, bad.key, self.awake.advance()))
            self.server.answer(reply.to.peer, reply.to.request, error_reply(bad))
        except SlimebusError as bad:
            log.error("%s", bad.text)
            self.server.answer(reply.to.peer, reply.to.request, error_reply(bad))
        else:
            self.server.answer(reply.to.peer, reply.to.request, reply.message, bulk)

    def _frames(self, part: Bulk, writes: Writes) -> Sequence[Any]:
        match part:
            case Inline(value):
                return [value]
            case EvalPrompt(dataset, row):
                return [self.eval_rows[dataset].record(row)]
            case StoredPrompt(group):
                written = writes.get(("prompts", group))  # most leases are of prompts drawn in the same burst
                return [self._present(written.value if written else self.store.get("prompts", group), "prompts", group)]
            case StoredPayload(group, late, only):
                frames = self._present(self.store.frames("payloads", group), "payloads", group)
                return assembled(frames, [(f, self._late(group, f)) for f in late], only) if late or only is not None else frames
            case StoredPartial(group):
                return self._present(self.store.frames("partials", group), "partials", group)

    def _late(self, group: str, field: Field) -> Any:
        key = field_key(group, field.name)
        return self._present(self.store.frames("fields", key), "fields", key)[0]

    def _present(self, value: T | None, table: str, key: str) -> T:
        if value is None:
            raise Damaged(table, key, f"{table} of group {key} are gone; ask again", code="gone")
        return value

    # --- keys ---

    def _mind_keys(self, guard: Guard, now: float) -> list[Effect]:
        """Act on what changed in the keys: who was let in before the change must not stay in."""
        change = guard.change()
        if change is None:
            return []
        if change.is_renewed:
            log.info("the broker has a new key; connections that are open stay, new ones must expect it")
            self.server.renew_key()
        if change.is_renewed or change.is_narrower:
            self._close_hints()
            self._open_hints(self.hints_endpoint, patience_s=REBIND_S)
        return self.machine.expel(change.revoked, now) if change.revoked else []

    def _outside(self) -> dict[str, Any]:
        """What the status says of this process's sockets."""
        return {
            "security": security(self.endpoint, self.guard.keyring if self.guard else None),
            "bounds": bounds(self.machine.state) | self.server.bounds(),
            "refused": dict(self.server.refused),
        }

    # --- hints ---

    def _open_hints(self, address: str, *, patience_s: float = 0.0) -> None:
        self.hints = self.server.context.socket(zmq.XPUB)
        self.hints.linger = 200
        self.hints.sndhwm, self.hints.rcvhwm, self.hints.maxmsgsize = MAX_HINTS, MAX_HINTS, MAX_SUBSCRIPTION_BYTES
        self._strange_bytes = 0
        self.server.doorman.guard(self.hints)
        self.hints_endpoint = bind_socket(self.hints, address, patience_s=patience_s)

    def _close_hints(self) -> None:
        self.server.doorman.unguard(self.hints)
        self.hints.close()

    def _hint(self, hint: Hint) -> None:
        self._last_hint = hint
        try:
            self.hints.send(envelope.encode(hint, id=0, run=self.server.run, sender="broker"), zmq.NOBLOCK)
        except zmq.Again:
            log.debug("hint not sent: a subscriber is slow")

    def _greet_subscribers(self) -> None:
        """Whoever subscribes hears the last hint again, so that a late joiner need not wait for the next."""
        is_new = False
        while self._strange_bytes <= MAX_STRANGE_BYTES and has_input(self.hints):
            asked = self.hints.recv(zmq.NOBLOCK)
            is_new = asked == SUBSCRIBE_ALL or is_new
            self._strange_bytes += len(asked) - 1
        if self._strange_bytes > MAX_STRANGE_BYTES:  # libzmq keeps topics that are never sent as long as the socket: a new one has none
            self.server.refused["subscriptions"] += 1
            self._close_hints()
            self._open_hints(self.hints_endpoint, patience_s=REBIND_S)
        if is_new and self._last_hint.lineage:
            self._hint(self._last_hint)


def event_of(request: Request) -> Event:
    """What the state machine sees of a request."""
    header = request.header
    return Event(
        to=Address(request.peer, header.id),
        sender=header.sender,
        epoch=header.epoch,
        run=header.run,
        message=request.message,
        body=bytes(header.body),
        bulk=request.bulk,
        key=request.key,
    )

"""The broker's loop: receive a burst of requests, let the state machine decide, commit, reply.

    ROUTER --burst--> StateMachine --effects--> one commit --> replies --> hints (XPUB)

Nobody is answered before what the answer rests on is as durable as the store promises.
"""

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from broker.hints import HintPublisher
from broker.keyring_watcher import KeyringWatcher, security
from broker.source import FileRows
from broker.state.effects import Address, Effect, Event, Note, Notify, Record, Reply, RowTable, StepHistory, Write
from broker.state.prompt_source import PromptSource
from broker.state.records import BufferFilter
from broker.state.rules import Rules
from broker.state_machine import StateMachine
from broker.store import Damaged, Store, StoreError
from broker.store.interface import damaged_store
from broker.store.reply_frames import ReplyFrames, Writes
from broker.suspend_tolerant_clock import Clock, SuspendTolerantClock
from slimebus.bus.envelope import error_reply
from slimebus.bus.errors import SlimebusError
from slimebus.bus.messages import Error, HeartbeatReply, Hint, Status, StatusReply
from slimebus.bus.transport.server import DEFAULT_MAX_MESSAGE_BYTES, Limits, Request, Server
from slimebus.security.keyring import Keyring
from slimebus.telemetry.metrics import JsonLines
from slimebus.telemetry.spans import Spans

log = logging.getLogger("slimebus.broker")

MAX_IDLE_S = 0.5
"""How often a stop request is looked for; two wake-ups a second cost nothing."""
COLLECT_S, COLLECT_FROM = 0.004, 1024
"""With so many members a burst collects requests for this long: each costs half as much then (10,000 idle workers), none is so urgent."""
RETRY_S = 1.0
"""Between two attempts to write what the store could not take."""
LOG_INTERVAL_S = 60.0
"""How often the log repeats that the store still cannot be written."""
PAUSE_TO_COST, MAX_STATUS_PAUSE_S = 20, 0.5
"""After a status come so many times the seconds that it took, at most MAX_STATUS_PAUSE_S, before the next one: it costs a twentieth."""
ONE_AT_A_TIME = "the status that this connection asked for before is on its way: one at a time"
RESTORED_TABLES: tuple[RowTable, ...] = get_args(RowTable)


class Broker:
    """A bound broker with its state read back. `endpoint` and `hints.endpoint` are the addresses it got.

    eval_rows: the rows of each held-out set of `rules.eval_datasets`. metrics_path: JSON lines, one per trained step and result.
    limits: of the ROUTER. validates: as of StateMachine. Raises UsageError for an address in use or a store of another run.
    """

    def __init__(
        self, rules: Rules, source: PromptSource, store: Store, *, run: str, bind: str = "tcp://127.0.0.1:0",
        hints_bind: str = "tcp://127.0.0.1:0", eval_rows: Mapping[str, FileRows] | None = None, clock: Clock = time,
        metrics_path: Path | None = None, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, limits: Limits | None = None,
        keyring: Keyring | None = None, buffer_filter: BufferFilter | None = None, validates: bool = False,
    ) -> None:  # fmt: skip
        self.store, self.clock, self.frames = store, clock, ReplyFrames(store, eval_rows or {})
        self.broker_clock = SuspendTolerantClock(self.clock)
        self.metrics = JsonLines(metrics_path)
        self.spans = Spans(metrics_path.parent if metrics_path else None, "broker", run=run)
        self._stop = threading.Event()
        self._blocked: tuple[StoreError, float] | None = None
        """What the store could not take at the last attempt, and since when, by `clock`."""
        self._store_problem, self._all_heard = "", True
        self._last_report: dict[str, Any] = {}
        self.num_turns = 0
        with contextlib.ExitStack() as opened:
            opened.callback(store.close)
            self.server = Server(bind, run=run, name="broker", max_message_bytes=max_message_bytes, limits=limits, keyring=keyring)
            opened.callback(self.server.close)
            self.status_responder = StatusResponder(self.server, clock, self.last_status)
            self.keys = KeyringWatcher(self.server, keyring) if keyring is not None else None
            self.endpoint = self.server.endpoint
            self.hints = HintPublisher(self.server, hints_bind, earlier=store.hints)
            opened.callback(self.hints.close)
            first_id = int(self.clock.time() * 1000)  # above all given so far, also where the folder lost its last writes, or all
            self.machine = StateMachine(
                rules, source, run=run, first_id=first_id, hints=self.hints.endpoint, max_message_bytes=max_message_bytes,
                buffer_filter=buffer_filter, validates=validates,
            )  # fmt: skip
            self._restore()
            self._opened = opened.pop_all()
        store.announce(self.endpoint, self.hints.endpoint)
        self.hints.last = Hint(**self.machine.state.meta.newest())

    def _restore(self) -> None:
        rows = ((table, key, value) for table in RESTORED_TABLES for key, value in self.store.scan(table))
        gc.disable()  # a million groups are made here and none is garbage; looking for some doubles the time
        try:
            self.machine.restore(rows, self.broker_clock.now)
        except (Damaged, msgspec.DecodeError, UnicodeDecodeError) as bad:
            raise damaged_store(f"of run {self.server.run!r}", bad) from None
        finally:
            gc.enable()

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set, or the run is finished and everyone has left."""
        self._stop = stop
        try:
            while not stop.is_set() and not self.machine.is_over:
                self.run_once(MAX_IDLE_S)
        except StoreError as bad:
            log.error("stopped with a store that cannot be written (%s): what was not acknowledged will be asked again", bad.text)
        finally:
            self.close()

    def run_once(self, max_wait_s: float) -> int:
        """One burst: receive, decide, commit, answer. Returns how many requests it had. Raises StoreError as its commit does."""
        self.num_turns += 1
        before = self._store_problem
        collect_s = COLLECT_S if self._all_heard and len(self.machine.state.clients) >= COLLECT_FROM else 0.0
        requests = self._admitted(self.server.receive(self._receive_timeout_s(max_wait_s), collect_s))
        now = self.broker_clock.advance()
        effects: list[Effect] = []
        self._all_heard = self.server.is_drained
        if self.keys is not None:
            requests = self.keys.answer_keys(requests)
            effects += self._apply_key_changes(self.keys, now)
        if requests or self._store_problem != before:
            effects += self._decide(requests, now)
        deadline = self.machine.next_deadline()
        heard_until = self.broker_clock.heard_until(all_heard=self._all_heard)
        if not requests or (deadline is not None and deadline <= heard_until):
            effects += self.machine.tick(now, heard_until)
        self._commit_and_reply(effects)
        self.hints.greet_subscribers()
        self.status_responder.answer()
        return len(requests)

    def _decide(self, requests: Sequence[Request], now: float) -> list[Effect]:
        events = [event_of(request) for request in requests]
        lost = {peer for peer in self.machine.conflicting_peers(events) if not self.server.is_connected(peer)}
        return self.machine.apply(events, now, store_problem=self._store_problem, lost_peers=lost)

    def close(self) -> None:
        """Release addresses and store."""
        self.status_responder.answer(is_last=True)
        self._last_report = self.store.report()
        self.metrics.flush()
        self._opened.close()

    def last_status(self) -> dict[str, Any]:
        """The status as it is now; also after close, and while the store cannot be written, which the broker's clock does not count."""
        blocked_s = 0.0 if self._blocked is None else self.clock.monotonic() - self._blocked[1]
        now = self.broker_clock.advance() if self._blocked is None else self.broker_clock.now + blocked_s
        status, store = self.machine.status(now), self._last_report or self.store.report()
        if self._blocked is not None:
            store = store | {"problem": self._blocked[0].text, "unwritten_s": round(blocked_s, 3)}
        elif self._store_problem:
            store = store | {"problem": self._store_problem}
        return status | {
            "store": store,
            "security": security(self.endpoint, self.keys.keyring if self.keys else None),
            "bounds": status["bounds"] | self.server.bounds(),
            "refused": dict(self.server.refused),
        }

    def _receive_timeout_s(self, max_wait_s: float) -> float:
        deadline = self.machine.next_deadline()
        due_s = float("inf") if deadline is None else max(0.0, deadline - self.broker_clock.advance())
        return min(max_wait_s, due_s, self.status_responder.due_s)

    # --- effects ---

    def _commit_and_reply(self, effects: Sequence[Effect]) -> None:
        """Write what is to be written, then say the rest. Raises StoreError, after which nothing is written or said."""
        writes: dict[tuple[str, str], Write] = {}
        said: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Write):
                writes[effect.table, effect.key] = effect
            else:
                said.append(effect)
        if writes:
            self._commit_until_written(list(writes.values()))
        for effect in said:
            self._emit(effect, writes)

    def _emit(self, effect: Effect, writes: Writes) -> None:
        if isinstance(effect, Reply):
            if isinstance(effect.message, StatusReply):
                self.status_responder.add(effect.to)
            else:
                self._reply(effect, writes)
        elif isinstance(effect, Notify):
            self.hints.publish(effect.hint)
        elif isinstance(effect, Note):
            log.log(logging.WARNING if effect.is_warning else logging.INFO, "%s", effect.text)
        elif isinstance(effect, Record):
            self.metrics.add({"time": self.clock.time(), **effect.row})
        elif isinstance(effect, StepHistory):
            self._add_history(effect)

    def _add_history(self, history: StepHistory) -> None:
        """Record how the groups of a step came to be trained, by the wall clock."""
        shift = self.clock.time() - self.broker_clock.advance()  # read together: history.now was before the commit
        first = min((at for _, life in history.groups.values() for _, at in life), default=history.now)
        about = {"step": history.step, "shift": shift, "train_s": history.train_s, "after_s": history.after_s, "lives": history.groups}
        self.spans.record("step", first + shift, history.now - first, about)

    def _reply(self, reply: Reply, writes: Writes) -> None:
        try:
            bulk = [frame for part in reply.bulk for frame in self.frames.frames_for(part, writes)]
            if isinstance(reply.message, HeartbeatReply):
                reply.message.time = self.clock.time()
                reply.message.keys = self.keys.keyring.generation if self.keys else 0
        except SlimebusError as bad:
            log.error("%s", bad.text)
            if isinstance(bad, Damaged):
                self._commit_and_reply(self.machine.recover_record(bad.table, bad.key, self.broker_clock.advance()))
            self.server.answer(reply.to.peer, reply.to.request, error_reply(bad))
        else:
            self.server.answer(reply.to.peer, reply.to.request, reply.message, bulk)

    # --- a store that takes no more ---

    def _admitted(self, requests: list[Request]) -> list[Request]:
        """The requests that there is room for. Samples for which there is none are refused; what frees room always goes on."""
        size_bytes = sum(len(frame) for request in requests for frame in request.bulk)
        self._note_store_problem(self.store.refusal(size_bytes))
        return [r for r in requests if not r.bulk or self._has_room(r)] if self._store_problem else requests

    def _has_room(self, request: Request) -> bool:
        text = self.store.refusal(sum(map(len, request.bulk)))
        if text:
            self.server.reply(request, Error(code="disk_full", text=text, retryable=True))
        return not text

    def _note_store_problem(self, text: str) -> None:
        if text and not self._store_problem:
            log.error("%s; no samples are taken and no groups leased until then", text)
        elif self._store_problem and not text:
            log.warning("the broker's store has room again; samples are taken and groups leased")
        self._store_problem = text

    def _commit_until_written(self, writes: Sequence[Write]) -> None:
        """Have these written, however long that takes: none of them is answered, and nothing else decided, until they are.

        Meanwhile every request is answered with the problem, to be asked again, and the time does not count. Raises StoreError
        when the broker has to stop before.
        """
        began, logged_at, last_code = self.clock.monotonic(), float("-inf"), ""
        while True:
            try:
                self.store.commit(writes)
                break
            except StoreError as bad:
                now, self._blocked = self.clock.monotonic(), (bad, began)
                if bad.code != last_code or now >= logged_at + LOG_INTERVAL_S:
                    log.error("%s%s", f"still, for {now - began:.0f} s: " if last_code else "", bad.text)
                    logged_at, last_code = now, bad.code
                self._refuse_all(bad, until=now + RETRY_S)
        if self._blocked is not None:
            self._store_problem, self._blocked = self._blocked[0].text, None
            log.warning("the broker's store is written again after %.1f s; nothing was lost", self.clock.monotonic() - began)

    def _refuse_all(self, problem: StoreError, *, until: float) -> None:
        """Answer the status, and with `problem` all else. Raises it when the broker has to stop."""
        self.machine.note_store_problem(problem.text)
        while (left_s := until - self.clock.monotonic()) > 0:
            if self._stop.is_set():
                raise problem
            self.num_turns += 1
            for request in self.server.receive(min(MAX_IDLE_S, left_s, self.status_responder.due_s)):
                if isinstance(request.message, Status):
                    self.status_responder.add(event_of(request).to)
                else:
                    self.server.reply(request, error_reply(problem))
            self.status_responder.answer()

    # --- keys ---

    def _apply_key_changes(self, watcher: KeyringWatcher, now: float) -> list[Effect]:
        """Act on what changed in the keys: who was let in before the change must not stay in."""
        change = watcher.change()
        if change is None:
            return []
        if change.is_renewed:
            log.info("the broker has a new key; connections that are open stay, new ones must expect it")
            self.server.renew_key()
        if change.is_renewed or change.is_narrower:
            self.hints.reopen()
        return self.machine.revoke_keys(change.revoked, now) if change.revoked else []


def event_of(request: Request) -> Event:
    """What the state machine sees of a request."""
    header, message, bulk = request.header, request.message, request.bulk
    to = Address(request.peer, header.id)
    return Event(to=to, sender=header.sender, epoch=header.epoch, run=header.run, message=message, bulk=bulk, key=request.key)


class StatusResponder:
    """The requests that wait for the next document. Used by one thread. document: makes it."""

    def __init__(self, server: Server, clock: Clock, document: Callable[[], dict[str, Any]]) -> None:
        self._server, self._clock, self._document = server, clock, document
        self._waiting: dict[bytes, int] = {}
        self._next_at = float("-inf")

    def add(self, to: Address) -> None:
        """Answer this request with the next document; a peer that has another one unanswered, or unread, is refused."""
        if self._server.has_unread(to.peer) or self._waiting.setdefault(to.peer, to.request) != to.request:
            self._server.answer(to.peer, to.request, Error(code="busy", text=ONE_AT_A_TIME, retryable=True), is_excess=True)

    @property
    def due_s(self) -> float:
        """Seconds until somebody is to be answered."""
        return max(0.0, self._next_at - self._clock.monotonic()) if self._waiting else float("inf")

    def answer(self, *, is_last: bool = False) -> None:
        """Answer all who wait, where the time has come, or `is_last`."""
        started = self._clock.monotonic()
        if not self._waiting or (started < self._next_at and not is_last):
            return
        frame = msgspec.json.encode(self._document())
        waiting, self._waiting = self._waiting, {}
        for peer, request in waiting.items():
            self._server.answer(peer, request, StatusReply(), [frame])
        ended = self._clock.monotonic()
        self._next_at = ended + min(MAX_STATUS_PAUSE_S, PAUSE_TO_COST * (ended - started))

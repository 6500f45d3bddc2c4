"""A client of one server: deadlines, retries, reconnects and heartbeats, from one background thread.

The thread owns the DEALER socket, so requests may come from any thread and heartbeats go on while the caller computes.
Every request has an id and is sent again on a new connection, one without bulk frames also when no answer came within `resend_s`;
servers treat repeats as the same request, so a lost connection or a restarted broker costs time and nothing else. Without a connection
nothing is sent, and at most one heartbeat is under way: a broker that comes back finds one message of each request and not a backlog.
Bulk waits here while MAX_BULK_BYTES are unanswered, so that heartbeats and leases are not queued behind it and a slow server is not
handed more.

    caller --queue--> thread --DEALER--> server        caller <--Future-- thread <-- reply
"""

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import queue
import secrets
import socket as host_socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from slimebus.bus import envelope, protocol
from slimebus.bus import messages as m
from slimebus.bus.errors import Fenced, ProtocolError, SlimebusError, Unreachable, UsageError
from slimebus.bus.transport.dealer import Dealer
from slimebus.bus.transport.request import Pending, ReceivedReply, Silence
from slimebus.security.credentials import Credentials
from slimebus.security.exposure import is_address, reachable

log = logging.getLogger("slimebus.transport")

REJOIN_S = 60.0
RETRY_S = 0.5
"""Pause before a request that the server could not do yet is sent again."""
BULK_RETRY_S = 2.0
"""The same for one with bulk frames: the server waits for its disk, and each try crosses the network."""
FULL_RETRY_S = 0.2
"""The same for one that found the queue to the server full."""
MAX_BULK_BYTES = 16 << 20
"""Bulk that is unanswered at once: at 1 Gbit/s a heartbeat behind it waits 0.13 s. A single larger request goes alone."""
PATIENT_CODES = ("disk_full", "store")
"""The server lives and waits for a person to mend its disk: a member that asked waits with it, beyond its deadline."""
LOG_INTERVAL_S = 30.0
LONGEST_POLL_S = 5.0


class Client:
    """A connection to the server at `address`. Safe to use from any thread.

    `run` stays empty until a welcome names it. Requests that are not answered by their deadline raise Unreachable; error
    replies raise SlimebusError with the server's code. UsageError for what is no address.

    credentials: the key to connect with, encrypted; None connects in the clear.
    """

    def __init__(
        self, address: str, *, name: str, peer: str = "broker", resend_s: float = 5.0, credentials: Credentials | None = None
    ) -> None:
        if not is_address(address):
            raise UsageError(f"{address[:200]!r} is no address of a {peer}; expected tcp://HOST:PORT")
        try:
            envelope.check_name(f"the name of this {peer}'s client:", name)
        except (ProtocolError, UnicodeEncodeError) as bad:
            raise UsageError(f"{bad}; choose a shorter name") from None
        self.address, self.name, self.peer, self.resend_s, self.credentials = address, name, peer, resend_s, credentials
        self.run, self.epoch, self.protocol = "", 0, m.OLDEST_PROTOCOL
        self.instance = secrets.token_hex(8)
        self.settings: dict[str, str] = {}
        """Said with each hello, for the server to compare with the run's."""
        self.rejoins = False
        """Say hello again, as the role of `join`, when the server has forgotten us; else its refusal is the request's error."""
        self._role, self._is_rejoining = "", False
        self._ids = itertools.count(secrets.randbits(31) << 20)
        self._outbox: queue.SimpleQueue[tuple[int, Pending]] = queue.SimpleQueue()
        self._pending: dict[int, Pending] = {}
        self._beat: Callable[[], m.Heartbeat] | None = None
        self._on_beat: Callable[[m.HeartbeatReply], None] = lambda reply: None
        self._on_lost: Callable[[SlimebusError], None] = lambda problem: None
        self.on_clock: Callable[[float, float], None] = lambda took_s, offset_s: None
        """Told with each heartbeat's answer how long it took, and by how much the server's clock is ahead of ours, by half of that unsure
        (the offset of NTP, RFC 5905, section 8)."""
        self.keys_generation = 0
        """Of the server's allow-list, as the last heartbeat's answer says; 0 without heartbeats or keys."""
        self._beat_every_s, self._next_beat = 0.0, float("inf")
        self._last_beat: Future[ReceivedReply] | None = None
        self._on_hint: Callable[[m.Hint], None] = lambda hint: None
        self._hints: Any = None
        self._hints_address = self._subscribed_to = ""
        self._log_at = 0.0
        self._fenced: SlimebusError | None = None
        self._silence = Silence(f"{peer} at {address}")
        self._closing = threading.Event()
        self._gate = threading.Lock()  # nothing enters the outbox after its last look, and nobody writes to a closed pipe
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._context = zmq.Context()
        identity = f"{self.name}/{self.instance}".encode()[:200]
        self._connection = 0
        """The number of the connection that requests were last sent through."""
        self._dealer = Dealer(self._context, address, peer=peer, identity=identity, credentials=credentials)
        self._thread = threading.Thread(target=self._loop, name=f"bus-{name}", daemon=True)
        self._thread.start()

    @property
    def refusal(self) -> str:
        """Why the server did not take us in, when the last handshake failed; empty otherwise."""
        return self._dealer.refusal

    # --- requests ---

    def submit(
        self, message: m.Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0, resend_s: float | None = None
    ) -> "Future[ReceivedReply]":
        """Send, and return a future of the reply. It fails with Unreachable after `timeout_s` seconds; close() cancels it."""
        pending = Pending(message, bulk, timeout_s, resend_s or self.resend_s)
        with self._gate:
            if self._closing.is_set():
                pending.future.cancel()
            else:
                self._outbox.put((next(self._ids), pending))
                os.write(self._wake_w, b"!")
        return pending.future

    def call(self, message: m.Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0) -> ReceivedReply:
        """Send and block for the reply. Raises SlimebusError."""
        return self.submit(message, bulk, timeout_s=timeout_s).result()

    async def ask(
        self, message: m.Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0, resend_s: float | None = None
    ) -> ReceivedReply:
        """Send and await the reply. Raises SlimebusError."""
        return await asyncio.wrap_future(self.submit(message, bulk, timeout_s=timeout_s, resend_s=resend_s))

    # --- membership ---

    def join(self, role: str, *, timeout_s: float, take_over: bool = False) -> m.Welcome:
        """Say hello until welcomed or `timeout_s` ran out; then remember run and epoch for every later request.

        take_over: replace a living process of this name and role.
        """
        self._role = role
        return self._enter(self.call(self._hello(take_over=take_over), timeout_s=timeout_s))

    def _hello(self, *, take_over: bool = False) -> m.Hello:
        hello = m.Hello(role=self._role, instance=self.instance, release=protocol.release(), settings=self.settings, take_over=take_over)
        hello.host, hello.pid = host_socket.gethostname()[:255], os.getpid()
        hello.protocol, hello.oldest = m.PROTOCOL_VERSION, m.OLDEST_PROTOCOL
        return hello

    def _enter(self, reply: ReceivedReply) -> m.Welcome:
        welcome = reply.expect(m.Welcome)
        self.run, self.epoch, self.protocol = welcome.run, welcome.epoch, welcome.protocol
        return welcome

    def keep_alive(
        self, every_s: float, beat: Callable[[], m.Heartbeat], on_reply: Callable[[m.HeartbeatReply], None],
        on_lost: Callable[[SlimebusError], None],
    ) -> None:  # fmt: skip
        """Send `beat()` every `every_s` seconds from the background thread; `on_lost` is called when the server refuses us."""
        self._beat_every_s, self._beat, self._on_beat, self._on_lost = every_s, beat, on_reply, on_lost
        self.beat_now()

    def listen(self, address: str, on_hint: Callable[[m.Hint], None]) -> None:
        """Call `on_hint`, from the background thread, for every hint published at `address`."""
        self._on_hint, self._hints_address = on_hint, address
        self._wake()

    @property
    def silent_s(self) -> float:
        """Seconds for which a heartbeat has waited for an answer, 0 when none does."""
        return self._silence.seconds

    def shorten_deadlines(self, left_s: float) -> None:
        """Wait no longer than this for what is asked already. To be called in `on_beat` alone."""
        for pending in self._pending.values():
            pending.deadline = min(pending.deadline, time.monotonic() + left_s)

    def beat_now(self) -> None:
        """Bring the next heartbeat forward."""
        self._next_beat = time.monotonic()
        self._wake()

    def close(self, *, goodbye: bool = True) -> None:
        """Leave (telling the server, briefly) and stop the thread."""
        if self._closing.is_set():
            return
        # A heartbeat behind the goodbye would be refused, as one of a server that forgot us.
        self._beat, self.rejoins, self._on_lost = None, False, lambda problem: None
        try:
            if goodbye and self.epoch:
                self.call(m.Goodbye(), timeout_s=1.0)
        except SlimebusError as unheard:
            log.debug("goodbye not heard: %s", unheard.text)
        finally:  # also when interrupted: threads that wait for an answer would keep the process
            with self._gate:
                self._closing.set()
                os.write(self._wake_w, b"!")
            self._thread.join(timeout=5.0)
            os.close(self._wake_w)
            os.close(self._wake_r)

    def _wake(self) -> None:
        with self._gate:
            if not self._closing.is_set():
                os.write(self._wake_w, b"!")

    # --- the thread ---

    def _loop(self) -> None:
        while not self._closing.is_set():
            self._wait()
            self._follow_connection()
            self._receive_hints()
            while not self._outbox.empty():
                self._add(*self._outbox.get_nowait())
            self._receive()
            self._heartbeat()
            self._expire_and_resend()
            self._send_bulk()
        while not self._outbox.empty():
            self._outbox.get_nowait()[1].future.cancel()
        for pending in self._pending.values():
            pending.future.cancel()
        if self._hints is not None:
            self._hints.close()
        self._dealer.close()
        self._context.term()

    def _wait(self) -> None:
        now = time.monotonic()  # what is due and was not sent waits for an answer or a connection, which wake us
        due = (p.deadline if p.resend_at <= now else min(p.deadline, p.resend_at) for p in self._pending.values())
        next_beat = self._next_beat if self._can_send_heartbeat else float("inf")
        until = min(next_beat, self._dealer.reopen_at, now + LONGEST_POLL_S, min(due, default=float("inf")))
        poller = zmq.Poller()
        for source in (self._wake_r, self._dealer.socket, self._dealer.monitor, self._hints):
            if source is not None:
                poller.register(source, zmq.POLLIN)
        poller.poll(max(0, int((until - now) * 1000) + 1))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_r, 4096)

    def _follow_connection(self) -> None:
        """Have what was sent through an earlier connection sent again through a new one."""
        self._dealer.follow()
        if self._dealer.num_connections != self._connection:
            self._connection = self._dealer.num_connections
            for pending in self._pending.values():
                if pending.sent_on:
                    pending.resend_at = 0.0

    def _receive_hints(self) -> None:
        if self._hints_address != self._subscribed_to:
            if self._hints is not None:
                self._hints.close()
            self._subscribed_to = self._hints_address
            self._hints = self._dealer.subscribe(reachable(self._subscribed_to, self.address))
        while self._hints is not None and self._hints.poll(0):
            try:
                hint = envelope.decode(self._hints.recv_multipart(zmq.NOBLOCK)[-1:]).message
            except SlimebusError as bad:
                log.warning("hint from %s refused: %s", self.peer, bad.text)
                continue
            if isinstance(hint, m.Hint):
                self._on_hint(hint)

    def _add(self, request_id: int, pending: Pending) -> None:
        if self._fenced is not None:
            pending.resolve(self._fenced)
            return
        self._pending[request_id] = pending

    def _send_bulk(self) -> None:
        """Send the requests with bulk frames that this connection has not had, oldest first, as far as there is room."""
        if not self._dealer.is_connected:
            return
        now, connection = time.monotonic(), self._dealer.num_connections
        requests = [(request_id, pending) for request_id, pending in self._pending.items() if pending.bulk]
        unanswered_bytes = sum(pending.size_bytes for _, pending in requests if pending.sent_on == connection)
        for request_id, pending in requests:
            if pending.sent_on == connection or now < pending.resend_at:
                continue
            if unanswered_bytes and unanswered_bytes + pending.size_bytes > MAX_BULK_BYTES:
                return
            unanswered_bytes += pending.size_bytes
            self._send(request_id, pending)

    def _send(self, request_id: int, pending: Pending) -> None:
        if self._is_rejoining and not isinstance(pending.message, m.Hello):
            pending.retry_in(RETRY_S)  # with the epoch we still have it would look like an older process
            return
        try:
            header = envelope.encode(pending.message, id=request_id, run=self.run, sender=self.name, epoch=self.epoch, v=self.protocol)
            self._dealer.socket.send_multipart([header, *pending.bulk], zmq.NOBLOCK, copy=not pending.bulk)
            pending.sent_on = self._dealer.num_connections
        except zmq.Again:
            pending.retry_in(FULL_RETRY_S)
        except SlimebusError as bad:
            self._pending.pop(request_id, None)
            pending.resolve(bad)

    def _receive(self) -> None:
        while True:
            try:
                frames = self._dealer.socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            self._silence.end()
            try:
                got = envelope.decode(frames)
            except SlimebusError as bad:
                log.warning("reply from %s refused: %s", self.peer, bad.text)
                if bad.code == "protocol_version":
                    self._fail_all(bad)
                else:
                    self._fail_its_request(frames, bad)
                continue
            pending = self._pending.pop(got.header.id, None)
            if pending is not None and isinstance(got.message, m.Error):
                self._on_refusal(got.header.id, pending, envelope.problem_of(got.message, self.peer))
            elif pending is not None:
                pending.resolve(ReceivedReply(got.message, got.bulk))
            elif isinstance(got.message, m.Error) and got.message.code == "protocol_version":  # it could not even read our ids
                problem = protocol.unreadable(got.header.v)
                self._fail_all(ProtocolError(f"{self.peer} at {self.address}: {problem.text}", code=problem.code))

    def _fail_its_request(self, frames: list[bytes], problem: SlimebusError) -> None:
        """End the request that an unreadable reply answers, if it says which one: asked again, it would be answered alike."""
        with contextlib.suppress(ProtocolError):
            pending = self._pending.pop(envelope.decode_header(frames[0]).id, None)
            if pending is not None:
                pending.resolve(ProtocolError(f"the answer of {self.peer} at {self.address} cannot be read: {problem.text}"))

    def _fail_all(self, problem: SlimebusError) -> None:
        """No request will ever be answered otherwise, so none waits for its deadline: another release serves, or we are fenced."""
        pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.resolve(problem)

    def _on_refusal(self, request_id: int, pending: Pending, problem: SlimebusError) -> None:
        """Send the request again where that may help, else fail it."""
        if pending.future.cancelled():
            return
        if self.epoch and problem.code in PATIENT_CODES:
            pending.deadline = time.monotonic() + pending.timeout_s
            self._log_at_intervals(problem, logging.WARNING)
        elif problem.retryable and isinstance(pending.message, m.Hello):
            self._log_at_intervals(problem, logging.INFO)
        left_s = pending.deadline - time.monotonic()
        pause_s = BULK_RETRY_S if pending.bulk and left_s > BULK_RETRY_S else RETRY_S
        is_forgotten = problem.code == "not_joined" and self.rejoins and not isinstance(pending.message, m.Goodbye)
        has_new_key = problem.code == "forbidden" and self.credentials is not None and self.credentials.is_replaced()
        if is_forgotten:
            self._rejoin()
        elif has_new_key:
            log.info("the %s takes our older key no more; connecting with the new one", self.peer)
            self._dealer.reopen_at = 0.0
        elif not problem.retryable or left_s <= pause_s:
            pending.resolve(problem)
            return
        pending.retry_in(pause_s)
        self._pending[request_id] = pending

    def _log_at_intervals(self, problem: SlimebusError, level: int) -> None:
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + LOG_INTERVAL_S
            log.log(level, "%s", problem.text)

    def _rejoin(self) -> None:
        """The server does not know us: it lost its memory, or has not heard us for long. What we leased there is lost."""
        if self._is_rejoining:
            return
        self._is_rejoining = True
        log.warning("the %s at %s does not know %s any more; joining again", self.peer, self.address, self.name)
        self._submit_own(self._hello(), REJOIN_S, self._on_rejoin_reply, resend_s=self.resend_s)

    def _on_rejoin_reply(self, future: "Future[ReceivedReply]") -> None:
        self._is_rejoining = False
        if future.cancelled():
            return
        try:
            self._enter(future.result())
        except Unreachable:
            return
        except SlimebusError as problem:
            self._on_lost(problem)

    def _submit_own(
        self, message: m.Message, timeout_s: float, then: "Callable[[Future[ReceivedReply]], None]", *, resend_s: float
    ) -> "Future[ReceivedReply]":
        """Send a request of the thread itself."""
        pending = Pending(message, (), timeout_s, resend_s)
        pending.future.add_done_callback(then)
        self._add(next(self._ids), pending)
        return pending.future

    def _expire_and_resend(self) -> None:
        now = time.monotonic()
        for request_id, pending in list(self._pending.items()):
            if pending.future.cancelled():
                del self._pending[request_id]
            elif now >= pending.deadline:
                del self._pending[request_id]
                what = type(pending.message).__name__.lower()
                text = f"no answer from the {self.peer} at {self.address} to {what!r} in {pending.timeout_s:.0f} s"
                why = self.refusal or "is it running and is the address right?"
                pending.resolve(Unreachable(f"{text}; {why} (asked by {self.name} on {host_socket.gethostname()})"))
            elif now >= pending.resend_at and not pending.bulk and self._dealer.is_connected:
                pending.resend_at = now + pending.resend_s
                self._send(request_id, pending)

    # --- heartbeats ---

    def _heartbeat(self) -> None:
        now = time.monotonic()
        self._silence.log(self.refusal or "what waits for it is sent again until it does")
        if self._beat is None or now < self._next_beat:
            return
        self._silence.begin()
        if self._can_send_heartbeat:
            self._next_beat, limit_s = now + self._beat_every_s, 4 * self._beat_every_s
            self._last_beat = self._submit_own(
                self._beat(), limit_s, functools.partial(self._on_heartbeat_reply, time.time()), resend_s=limit_s
            )

    @property
    def _can_send_heartbeat(self) -> bool:
        """False while a heartbeat waits for its answer, and without a connection: a later one will say what is true then."""
        return self._dealer.is_connected and (self._last_beat is None or self._last_beat.done())

    def _on_heartbeat_reply(self, sent_at: float, future: "Future[ReceivedReply]") -> None:
        if future.cancelled():
            return
        try:
            message = future.result().expect(m.HeartbeatReply)
        except SlimebusError as problem:
            if problem.code == Fenced.code:
                self._fenced, self._beat = problem, None
            if not problem.retryable:
                self._on_lost(problem)
            if self._fenced is not None:
                self._fail_all(self._fenced)
            return
        if self._hints_address and message.hints:  # a broker that was restarted may have bound another port
            self._hints_address = message.hints
        self.keys_generation = message.keys
        if message.time:
            took_s = time.time() - sent_at
            self.on_clock(took_s, message.time - sent_at - took_s / 2)
        self._on_beat(message)

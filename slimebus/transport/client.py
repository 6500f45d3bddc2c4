"""A client of one server: deadlines, retries, reconnects and heartbeats, from one background thread.

The thread owns the DEALER socket, so requests may come from any thread and heartbeats go on while the caller computes.
Every request has an id and is sent again on a fresh socket when no answer came within `resend_s`; servers treat repeats
as the same request, so a lost connection or a restarted broker costs time and nothing else.

    caller --queue--> thread --DEALER--> server        caller <--Future-- thread <-- reply
"""

import asyncio
import itertools
import logging
import os
import queue
import random
import re
import secrets
import socket as host_socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import zmq

from slimebus import envelope, protocol
from slimebus.errors import ProtocolError, SlimebusError, Unreachable, UsageError
from slimebus.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL_VERSION,
    TYPES,
    Error,
    Goodbye,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Hint,
    Message,
    Welcome,
    wire_name,
)
from slimebus.protocol import release
from slimebus.security.credentials import Credentials
from slimebus.security.exposure import reachable
from slimebus.transport.curve import connect_curve, end_watch, handshakes, is_vague, refusal, watch_handshakes

log = logging.getLogger("slimebus.transport")

REJOIN_S = 60.0
RETRY_S = 0.5
"""Pause before a request that the server could not do yet is sent again."""
PATIENT_CODES = ("disk_full", "store")
"""The server lives and waits for a person to mend its disk: a member that asked waits with it, beyond its deadline."""
SAY_AGAIN_S = 30.0
ADDRESS = re.compile(r"tcp://[^/]+:\d{1,5}|(ipc|inproc)://.+")
M = TypeVar("M", bound=Message)


class Reply:
    """A decoded reply and its bulk frames."""

    __slots__ = ("bulk", "message")

    def __init__(self, message: Message, bulk: Sequence[Any]) -> None:
        self.message, self.bulk = message, bulk

    def expect(self, kind: type[M]) -> M:
        """The message, which must be of this kind. Raises SlimebusError `protocol` for another."""
        if not isinstance(self.message, kind):
            text = f"the answer is of type {wire_name(type(self.message))!r}, expected {wire_name(kind)!r}"
            raise SlimebusError(f"{text}; run the same slimebus release everywhere", code="protocol")
        return self.message


class _Pending:
    __slots__ = ("bulk", "deadline", "future", "message", "resend_at", "resend_s", "timeout_s")

    def __init__(self, message: Message, bulk: Sequence[Any], timeout_s: float, resend_s: float) -> None:
        now = time.monotonic()
        self.message, self.bulk, self.timeout_s, self.resend_s = message, bulk, timeout_s, resend_s
        self.deadline, self.resend_at = now + timeout_s, now + resend_s
        self.future: Future[Reply] = Future()


class Client:
    """A connection to the server at `address`. Safe to use from any thread.

    `run` stays empty until a welcome names it. Requests that are not answered by their deadline raise Unreachable; error
    replies raise SlimebusError with the server's code. UsageError for what is no address.

    credentials: the key to connect with, encrypted; None connects in the clear. refusal: why the server did not take us in, when
    the last handshake failed; empty otherwise.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        peer: str = "broker",
        types: Mapping[str, type[Message]] = TYPES,
        resend_s: float = 5.0,
        credentials: Credentials | None = None,
    ) -> None:
        if not ADDRESS.fullmatch(address):
            raise UsageError(f"{address[:200]!r} is no address of a {peer}; expected tcp://HOST:PORT")
        self.address, self.name, self.peer, self.types, self.resend_s = address, name, peer, types, resend_s
        self.credentials = credentials
        self.refusal = ""
        self.run, self.epoch, self.protocol = "", 0, OLDEST_PROTOCOL
        self.instance, self.born = secrets.token_hex(8), time.time()
        self.rejoins = False
        """Say hello again, as the role of `join`, when the server has forgotten us; else its refusal is the request's error."""
        self._role, self._is_rejoining = "", False
        self._ids = itertools.count(secrets.randbits(31) << 20)
        self._outbox: queue.SimpleQueue[tuple[int, _Pending]] = queue.SimpleQueue()
        self._pending: dict[int, _Pending] = {}
        self._beat: Callable[[], Heartbeat] | None = None
        self._on_beat: Callable[[HeartbeatReply], None] = lambda reply: None
        self._on_lost: Callable[[SlimebusError], None] = lambda problem: None
        self._beat_every_s, self._next_beat = 0.0, float("inf")
        self._on_hint: Callable[[Hint], None] = lambda hint: None
        self._hints_address = ""
        self._say_at = 0.0
        self._closing = threading.Event()
        self._gate = threading.Lock()  # nothing enters the outbox after its last look, and nobody writes to a closed pipe
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_r, False)
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._loop, name=f"bus-{name}", daemon=True)
        self._thread.start()

    # --- requests ---

    def submit(
        self, message: Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0, resend_s: float | None = None
    ) -> "Future[Reply]":
        """Send, and return a future of the reply. It fails with Unreachable after `timeout_s` seconds; close() cancels it."""
        pending = _Pending(message, bulk, timeout_s, resend_s or self.resend_s)
        with self._gate:
            is_open = not self._closing.is_set()
            if is_open:
                self._outbox.put((next(self._ids), pending))
        if is_open:
            self._wake()
        else:
            pending.future.cancel()
        return pending.future

    def call(self, message: Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0) -> Reply:
        """Send and block for the reply. Raises SlimebusError."""
        return self.submit(message, bulk, timeout_s=timeout_s).result()

    async def ask(self, message: Message, bulk: Sequence[Any] = (), *, timeout_s: float = 30.0, resend_s: float | None = None) -> Reply:
        """Send and await the reply. Raises SlimebusError."""
        return await asyncio.wrap_future(self.submit(message, bulk, timeout_s=timeout_s, resend_s=resend_s))

    # --- membership ---

    def join(self, role: str, *, timeout_s: float) -> Welcome:
        """Say hello until welcomed or `timeout_s` ran out; then remember run and epoch for every later request."""
        hello = Hello(
            role=role, instance=self.instance, born=self.born, protocol=PROTOCOL_VERSION, oldest=OLDEST_PROTOCOL, release=release()
        )
        welcome = self.call(hello, timeout_s=timeout_s).expect(Welcome)
        self.run, self.epoch, self.protocol, self._role = welcome.run, welcome.epoch, welcome.protocol, role
        return welcome

    def keep_alive(
        self,
        every_s: float,
        beat: Callable[[], Heartbeat],
        on_reply: Callable[[HeartbeatReply], None],
        on_lost: Callable[[SlimebusError], None],
    ) -> None:
        """Send `beat()` every `every_s` seconds from the background thread; `on_lost` is told when the server refuses us."""
        self._beat, self._on_beat, self._on_lost = beat, on_reply, on_lost
        self._beat_every_s, self._next_beat = every_s, time.monotonic()
        self._wake()

    def listen(self, address: str, on_hint: Callable[[Hint], None]) -> None:
        """Call `on_hint`, from the background thread, for every hint published at `address`."""
        self._on_hint, self._hints_address = on_hint, address
        self._wake()

    def beat_now(self) -> None:
        """Bring the next heartbeat forward."""
        self._next_beat = time.monotonic()
        self._wake()

    def close(self, *, goodbye: bool = True) -> None:
        """Leave (telling the server, briefly) and stop the thread."""
        if self._closing.is_set():
            return
        try:
            if goodbye and self.epoch:
                self.call(Goodbye(), timeout_s=1.0)
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

    def _connect(self) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.setsockopt(zmq.IDENTITY, f"{self.name}/{self.instance}".encode()[:200])
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        socket.sndhwm = socket.rcvhwm = 4096
        self._secure(socket)
        self._monitor = watch_handshakes(socket)
        socket.connect(self.address.replace("localhost", "127.0.0.1"))
        return socket

    def _secure(self, socket: Any) -> None:
        if "[" in self.address:
            socket.ipv6 = True
        if self.credentials is not None:
            connect_curve(socket, self.credentials.pair, self.credentials.server)

    def _mind_handshakes(self, socket: Any, poller: zmq.Poller) -> Any:
        """The socket, or after a refusal and a pause a fresh one: libzmq does not try again by itself."""
        for event, value in handshakes(self._monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.refusal, self._reconnect_at, self._refusals = "", float("inf"), 0
            elif self._reconnect_at == float("inf"):
                self._note_refusal(event, value)
        if time.monotonic() < self._reconnect_at:
            return socket
        self._reconnect_at = float("inf")
        if self.credentials is not None:
            self.credentials.after_refusal()
        poller.unregister(socket)
        poller.unregister(self._monitor)
        end_watch(socket, self._monitor)
        socket.close()
        socket = self._connect()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        for pending in self._pending.values():
            pending.resend_at = 0.0
        return socket

    def _note_refusal(self, event: int, value: int) -> None:
        self._refusals += 1
        pause_s = RETRY_S * (1 if self._refusals < 4 else 4)
        key = str(self.credentials.path) if self.credentials else ""
        text = refusal(event, value, server=self.peer, key=key)
        if self.refusal and is_vague(event):
            text = self.refusal
        if text != self.refusal:
            log.log(logging.WARNING if self._refusals > 1 else logging.DEBUG, "%s: %s", self.address, text)
        self.refusal = text
        self._reconnect_at = time.monotonic() + random.uniform(0.5, 1.0) * pause_s

    def _loop(self) -> None:
        self._reconnect_at, self._refusals = float("inf"), 0
        socket = self._connect()
        poller = zmq.Poller()
        poller.register(self._wake_r, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        hints = None
        while not self._closing.is_set():
            poller.poll(self._poll_ms())
            self._drain_wake()
            socket = self._mind_handshakes(socket, poller)
            if self._hints_address and hints is None:
                hints = self._subscribe()
                poller.register(hints, zmq.POLLIN)
            if hints is not None:
                self._hear(hints)
            self._send_new(socket)
            self._receive(socket)
            self._expire(socket)
            self._heartbeat(socket)
        while not self._outbox.empty():
            self._outbox.get_nowait()[1].future.cancel()
        for pending in self._pending.values():
            pending.future.cancel()
        if hints is not None:
            hints.close()
        end_watch(socket, self._monitor)
        socket.close()
        self._context.term()

    def _subscribe(self) -> Any:
        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._secure(socket)
        socket.connect(reachable(self._hints_address, self.address))
        return socket

    def _hear(self, hints: Any) -> None:
        while hints.poll(0):
            try:
                hint = envelope.decode(hints.recv_multipart(zmq.NOBLOCK)[-1:], {"hint": Hint}).message
            except SlimebusError as bad:
                log.warning("hint from %s refused: %s", self.peer, bad.text)
                continue
            if isinstance(hint, Hint):
                self._on_hint(hint)

    def _poll_ms(self) -> int:
        soonest = min((min(p.deadline, p.resend_at) for p in self._pending.values()), default=float("inf"))
        wait_s = min(soonest, self._next_beat, self._reconnect_at) - time.monotonic()
        return 5000 if wait_s > 5 else max(0, int(wait_s * 1000) + 1)

    def _drain_wake(self) -> None:
        try:
            os.read(self._wake_r, 4096)
        except BlockingIOError:
            return

    def _send_new(self, socket: Any) -> None:
        while not self._outbox.empty():
            request_id, pending = self._outbox.get_nowait()
            self._pending[request_id] = pending
            self._send(socket, request_id, pending)

    def _send(self, socket: Any, request_id: int, pending: _Pending) -> None:
        if self._is_rejoining and not isinstance(pending.message, Hello):
            pending.resend_at = time.monotonic() + RETRY_S  # with the epoch we still have it would look like an older process
            return
        try:
            header = envelope.encode(pending.message, id=request_id, run=self.run, sender=self.name, epoch=self.epoch, v=self.protocol)
            socket.send_multipart([header, *pending.bulk], zmq.NOBLOCK, copy=not pending.bulk)
        except zmq.Again:
            pending.resend_at = time.monotonic() + 0.2  # the queue to the server is full: it is away or slow
        except SlimebusError as bad:
            self._pending.pop(request_id, None)
            _fail(pending, bad)

    def _receive(self, socket: Any) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            try:
                got = envelope.decode(frames, self.types)
            except SlimebusError as bad:
                log.warning("reply from %s refused: %s", self.peer, bad.text)
                if bad.code == "protocol_version":
                    self._fail_all(bad)
                continue
            pending = self._pending.pop(got.header.id, None)
            if pending is not None:
                self._settle(pending, got)
            elif isinstance(got.message, Error) and got.message.code == "protocol_version":  # it could not even read our ids
                self._fail_all(protocol.unreadable(got.header.v))

    def _fail_all(self, problem: SlimebusError) -> None:
        """The server is of another release: no request will ever be understood, so none waits for its deadline."""
        told = ProtocolError(f"{self.peer} at {self.address}: {problem.text}", code=problem.code)
        pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            _fail(one, told)

    def _settle(self, pending: _Pending, got: envelope.Envelope) -> None:
        if pending.future.cancelled():
            return
        try:
            message = envelope.raise_for_error(got.message, self.peer)
        except SlimebusError as problem:
            if self.epoch and problem.code in PATIENT_CODES:
                self._be_patient(pending, problem)
            is_forgotten = problem.code == "not_joined" and self.rejoins and not isinstance(pending.message, Goodbye)
            if is_forgotten:
                self._rejoin()
            if problem.code == "forbidden" and self.credentials is not None and self.credentials.is_replaced():
                log.info("the %s takes our older key no more; connecting with the new one of %s", self.peer, self.credentials.path)
                self._reconnect_at = 0.0
                self._pending[got.header.id] = pending
            elif (problem.retryable or is_forgotten) and time.monotonic() + RETRY_S < pending.deadline:
                pending.resend_at = time.monotonic() + RETRY_S
                self._pending[got.header.id] = pending
            else:
                _fail(pending, problem)
            return
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_result(Reply(message, got.bulk))

    def _be_patient(self, pending: _Pending, problem: SlimebusError) -> None:
        now = time.monotonic()
        pending.deadline = now + pending.timeout_s
        if now >= self._say_at:
            self._say_at = now + SAY_AGAIN_S
            log.warning("%s", problem.text)

    def _rejoin(self) -> None:
        """The server does not know us: it lost its memory, or has not heard us for long. What we leased there is lost."""
        if self._is_rejoining:
            return
        self._is_rejoining = True
        log.warning("the %s at %s does not know %s any more; joining again", self.peer, self.address, self.name)
        pending = _Pending(Hello(role=self._role, instance=self.instance, born=self.born), (), REJOIN_S, self.resend_s)
        pending.future.add_done_callback(self._rejoined)
        self._outbox.put((next(self._ids), pending))
        self._wake()

    def _rejoined(self, future: "Future[Reply]") -> None:
        self._is_rejoining = False
        if future.cancelled():
            return
        problem = future.exception()
        if problem is None and isinstance(welcome := future.result().message, Welcome):
            self.run, self.epoch = welcome.run, welcome.epoch
        elif isinstance(problem, SlimebusError) and not isinstance(problem, Unreachable):
            self._on_lost(problem)

    def _expire(self, socket: Any) -> None:
        now = time.monotonic()
        for request_id, pending in list(self._pending.items()):
            if pending.future.cancelled():
                del self._pending[request_id]
            elif now >= pending.deadline:
                del self._pending[request_id]
                what = type(pending.message).__name__.lower()
                _fail(
                    pending,
                    Unreachable(
                        f"no answer from the {self.peer} at {self.address} to {what!r} in {pending.timeout_s:.0f} s; "
                        f"{self.refusal or 'is it running and is the address right?'} "
                        f"(asked by {self.name} on {host_socket.gethostname()})"
                    ),
                )
            elif now >= pending.resend_at:
                pending.resend_at = now + pending.resend_s
                self._send(socket, request_id, pending)

    def _heartbeat(self, socket: Any) -> None:
        now = time.monotonic()
        if self._beat is None or now < self._next_beat:
            return
        self._next_beat = now + self._beat_every_s
        pending = _Pending(self._beat(), (), timeout_s=4 * self._beat_every_s, resend_s=self.resend_s)
        pending.future.add_done_callback(self._beaten)
        request_id = next(self._ids)
        self._pending[request_id] = pending
        self._send(socket, request_id, pending)

    def _beaten(self, future: "Future[Reply]") -> None:
        if future.cancelled():
            return
        problem = future.exception()
        if problem is None:
            message = future.result().message
            if isinstance(message, HeartbeatReply):
                self._on_beat(message)
        elif isinstance(problem, SlimebusError) and not problem.retryable:
            self._on_lost(problem)


def _fail(pending: _Pending, problem: SlimebusError) -> None:
    if pending.future.set_running_or_notify_cancel():
        pending.future.set_exception(problem)

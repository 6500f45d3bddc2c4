"""A ROUTER that hands out requests in bursts and sends replies when told to.

What does not parse is counted, logged with its peer, answered with an error where that is possible, and never ends the
process. The owner decides when to reply, so it can make a whole burst durable first.
"""

import logging
import resource
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq
from zmq.backend import Socket as PlainSocket

from slimebus.bus import envelope
from slimebus.bus.errors import ProtocolError, SlimebusError, UsageError
from slimebus.bus.messages import TYPES, Error, Hello, Message, Ok, StatusReply
from slimebus.bus.transport.authenticator import ConnectionAuthenticator
from slimebus.bus.transport.curve import serve_curve
from slimebus.bus.transport.unsent import Unsent
from slimebus.security.allow_list import Grant
from slimebus.security.keyring import Keyring
from slimebus.security.roles import JOINS_AS, PULL

log = logging.getLogger("slimebus.transport")

ZERO_COPY_BYTES = 16 * 1024
"""Below this, handing a frame over costs more than copying it. libzmq gives a larger frame memory of its own, so that a view that is
kept holds no more than the frame."""
DONTWAIT, POLLIN, EVENTS = int(zmq.DONTWAIT), int(zmq.POLLIN), int(zmq.EVENTS)
DONTWAIT_MORE = DONTWAIT | int(zmq.SNDMORE)
"""As plain numbers: combining the enumeration's members takes longer than sending a frame."""
MAX_JUNK = 4
"""Messages of a burst that may turn out to be nothing, once there is a request that waits for its answer."""
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_REPLIES = 1024
"""Replies that wait for one peer; more than a burst, so that only one that reads none has more."""
NO_REQUEST = 0
"""The id of what answers no request; clients ignore it."""
PUT_OFF = "what you asked for before is not taken yet, and there is no room for more"
REBIND_S = 5.0
MORE_CONNECTIONS = 64
"""For those who only ask, beside two of each client."""
OWN_FILES = 256
"""Of a process that serves, besides one for each connection: its sockets, logs, store, libraries."""
IO_THREADS = 4
"""One encrypts 260 MB/s and makes 3,000 handshakes a second."""
BACKLOG = 4096
"""Connections that wait to be accepted when all clients come at once; the system may have a lower bound (net.core.somaxconn)."""
MAX_REFUSALS = 100
REFUSAL_WINDOW_S = 5.0
"""As long as a client waits before it sends a request again."""
MAX_PEERS = 4096


class Request(msgspec.Struct, frozen=True, gc=False):
    """One message as it came: `peer` is the socket identity to answer to, `key` the name of the key it came under (empty: no keys)."""

    peer: bytes
    header: envelope.Header
    message: Message
    bulk: Sequence[Any]
    key: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds in memory at most, besides MAX_REPLIES replies that wait for one peer.

    max_connections: open at once, of those that have said who they are. max_queued: messages of one connection that wait to be looked at,
    before TCP makes its sender wait. burst_bytes: bulk after which a burst ends: a small request waits for at most that much to reach the
    disk, and at some hundred megabytes a second an fsync costs little beside it. unsent_bytes: of replies on their way
    (transport/unsent.py).
    """

    max_connections: int = 2048
    max_queued: int = 4
    burst_bytes: int = 4 << 20
    unsent_bytes: int = 1024 << 20


class RefusalLimiter:
    """Refusals of each peer in the present window of time. A bounded table: when it is full the window ends early.

    An honest peer is refused now and then: after a fencing, or when it lost its broker. One that is refused a hundred times in a few
    seconds is broken or hostile, and answering it takes time from all others. What it sends meanwhile is counted and dropped unread;
    requests are sent again until they are answered, so an honest one loses seconds and nothing else.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._refusals: dict[bytes, int] = {}
        self._window_ends = 0.0

    def refused(self, peer: bytes) -> bool:
        """Count a refusal; True when this one reaches the limit."""
        if self.clock() >= self._window_ends or len(self._refusals) >= MAX_PEERS:
            self._refusals.clear()
            self._window_ends = self.clock() + REFUSAL_WINDOW_S
        count = self._refusals[peer] = self._refusals.get(peer, 0) + 1
        return count == MAX_REFUSALS

    def is_silenced(self, peer: bytes) -> bool:
        """True while a peer is not listened to."""
        if not self._refusals or self._refusals.get(peer, 0) < MAX_REFUSALS:
            return False
        return self.clock() < self._window_ends


class Server:
    """A bound ROUTER socket. `endpoint` is the address it got (port 0 binds any free port).

    keyring: the keys that may connect and what they may ask for, encrypted; None lets everyone in, in the clear.

    `refused` counts what was refused or hit a bound, by its name. is_drained: the last `receive` left no message behind.
    """

    def __init__(
        self, bind: str, *, run: str = "", name: str = "broker", types: Mapping[str, type[Message]] = TYPES, burst: int = 256,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES, limits: Limits | None = None, keyring: Keyring | None = None,
    ) -> None:  # fmt: skip
        self.run, self.name, self.types, self.burst, self.keyring = run, name, types, burst, keyring
        self.limits = limits = limits or Limits()
        self.unsent = Unsent(limits.unsent_bytes)
        self.is_drained = True
        self._header_frame: Any = None  # of the message in hand: it knows the connection that it came through
        self.refused: Counter[str] = Counter()
        self.refusal_limiter = RefusalLimiter()
        allow_connections(limits.max_connections)
        self.context = zmq.Context(io_threads=IO_THREADS)
        self.authenticator = ConnectionAuthenticator(self.context, keyring, max_connections=limits.max_connections, refused=self.refused)
        self.socket = self.context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.socket.linger, self.socket.backlog = 200, BACKLOG
        self.socket.maxmsgsize = max_message_bytes
        self.socket.rcvhwm, self.socket.sndhwm = limits.max_queued, MAX_REPLIES
        self.socket.router_mandatory = 1  # a reply that has no place is an error, not a silent loss
        self.socket.router_handover = 1  # a client that reconnects keeps its identity
        self.authenticator.guard(self.socket)
        try:
            self.endpoint = bind_socket(self.socket, bind)
        except UsageError:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """True once something can be received, False after `timeout_s`."""
        if has_input(self.socket):
            return True
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def receive(self, timeout_s: float, collect_s: float = 0.0) -> list[Request]:
        """Up to `burst` requests, or `limits.burst_bytes` of them; waits at most `timeout_s` for the first and then `collect_s` for those
        that come close behind it. Nonsense makes none wait.
        """
        requests: list[Request] = []
        size_bytes = 0
        self.is_drained = not self.wait(timeout_s)
        if self.is_drained:
            return requests
        if collect_s:
            time.sleep(collect_s)
        for taken in range(self.burst):
            if requests and taken - len(requests) >= MAX_JUNK:
                break
            try:
                frames = self._receive_frames()
            except zmq.Again:
                self.is_drained = True
                break
            request = self._parse(frames)
            if request is None:
                continue
            requests.append(request)
            size_bytes += sum(map(len, request.bulk))
            if size_bytes >= self.limits.burst_bytes:
                self.refused["burst_mib"] += 1
                break
        return requests

    def _receive_frames(self) -> list[Any]:
        """One message: bytes, and views of what is too large to copy. Raises zmq.Again when there is none."""
        frames: list[Any] = [PlainSocket.recv(self.socket, DONTWAIT)]
        has_more, self._header_frame = True, None
        while has_more:  # a message is there as a whole or not at all, so none of these waits
            frame = PlainSocket.recv(self.socket, 0, False)
            if self._header_frame is None:
                self._header_frame = frame
            frames.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer)
            has_more = frame.more
        return frames

    def _parse(self, frames: list[Any]) -> Request | None:
        """The request of a message; None for one that is refused, and answered where it can be."""
        peer, frames = frames[0], frames[1:]
        if self.refusal_limiter.is_silenced(peer):
            self.refused["unread"] += 1
            return None
        request_id = 0
        try:
            envelope.check_frames(frames)
            header = envelope.decode_header(frames[0])
            request_id = header.id
            envelope.check_version(header)
            envelope.check_requester(header)
            grant = None if self.keyring is None else _grant_of(self.keyring, _property(self._header_frame, "User-Id"))
            message = envelope.decode_body(header, self.types)
            if grant is not None:
                _check_may(grant, header, message)
        except SlimebusError as bad:
            log.warning("message from %s at %s refused: %s", describe(peer), _property(self._header_frame, "Peer-Address"), bad.text)
            self.answer(peer, request_id, envelope.error_reply(bad))
            return None
        return Request(peer, header, message, frames[1:], "" if grant is None else grant.name)

    def reply(self, request: Request, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Answer a request; a peer that is gone or not reading is counted, not waited for."""
        self.answer(request.peer, request.header.id, message, bulk)

    def has_unread(self, peer: bytes) -> bool:
        """True while a status or a large reply is on its way to this peer."""
        return self.unsent.is_tracked(peer)

    def answer(self, peer: bytes, request_id: int, message: Message, bulk: Sequence[Any] = (), *, is_excess: bool = False) -> None:
        """Answer request `request_id` of `peer`, however long ago it came. Errors are counted by their code.

        A reply is handed over if there is room for it; else the peer asks again when it has taken those before.
        is_excess: of a retryable error, that an honest peer gets now and then: a hundred within seconds silence it like others.
        """
        if isinstance(message, Error):
            self.refused[message.code] += 1
            if (is_excess or not message.retryable) and self.refusal_limiter.refused(peer):
                text = "%s was refused %d times, the last: %s; it is not listened to for a while"
                log.warning(text, describe(peer), MAX_REFUSALS, message.text)
        try:
            header = envelope.encode(message, id=request_id, run=self.run, sender=self.name)
        except ProtocolError as bad:
            log.error("reply not sent: %s", bad.text)
            self.answer(peer, request_id, envelope.error_reply(bad))
            return
        frames, size = [peer, header, *bulk], 0
        if not isinstance(message, Error):
            size = self.unsent.to_track(peer, len(header) + sum(map(len, bulk)), at_once=isinstance(message, StatusReply))
        if size and not self.unsent.has_room(peer, size):
            waiting = self.unsent.total_bytes
            self._count("unsent_mib", "reply of %d bytes to %s put off: %d wait already", size, describe(peer), waiting)
            self.answer(peer, request_id, Error(code="busy", text=PUT_OFF, retryable=True))
            return
        if size:
            frames[-1] = self.unsent.frame(peer, frames[-1], size)
        try:
            self._send(frames)
        except zmq.ZMQError as bad:
            if size:
                self.unsent.reclaim(peer)
            if bad.errno == zmq.EHOSTUNREACH:
                self._count("peer_gone", "reply to %s not sent: it is gone", describe(peer))
            else:
                self._count("max_replies", "reply to %s not sent: %d wait for it already", describe(peer), MAX_REPLIES)

    def is_connected(self, peer: bytes) -> bool:
        """Whether a connection of this identity stands. It is sent an `ok` that answers nothing: libzmq refuses what has nowhere to go."""
        try:
            self._send([peer, envelope.encode(Ok(), id=NO_REQUEST, run=self.run, sender=self.name)])
        except zmq.ZMQError as bad:
            return bad.errno != zmq.EHOSTUNREACH
        return True

    def _count(self, reason: str, text: str, *words: object) -> None:
        self.refused[reason] += 1
        log.warning(text + " (%s: %d so far)", *words, reason, self.refused[reason])

    def bounds(self) -> dict[str, dict[str, Any]]:
        """Name of each bound of this socket -> limit, used, hits."""
        mib = 1 << 20
        limits: dict[str, tuple[int, int | None]] = {
            "max_connections": (self.authenticator.max_connections, self.authenticator.num_admitted),
            "max_queued_per_client": (self.limits.max_queued, None),
            "burst_mib": (self.limits.burst_bytes // mib, None),
            "unsent_mib": (self.unsent.limit_bytes // mib, self.unsent.total_bytes // mib),
            "max_replies": (MAX_REPLIES, None),
        }
        return {name: {"limit": limit, "used": used, "hits": self.refused[name]} for name, (limit, used) in limits.items()}

    def renew_key(self) -> None:
        """Listen anew under the keyring's newest pair. Connections that are open stay; new ones must expect the new key."""
        if self.keyring is None:
            return
        serve_curve(self.socket, self.keyring.pair)
        self.socket.unbind(self.endpoint)
        bind_socket(self.socket, self.endpoint, patience_s=REBIND_S)

    def _send(self, frames: list[Any]) -> None:
        """Send without waiting. Only the first frame can be refused; the others go where it went."""
        send, socket = PlainSocket.send, self.socket  # past pyzmq's options of other sockets, which take as long as sending
        for frame in frames[:-1]:
            send(socket, frame, DONTWAIT_MORE, len(frame) < ZERO_COPY_BYTES)
        last = frames[-1]
        send(socket, last, DONTWAIT, not isinstance(last, zmq.Frame) and len(last) < ZERO_COPY_BYTES)

    def close(self) -> None:
        """Release the address."""
        self.authenticator.close()
        self.socket.close()
        self.context.term()


def connections_of(max_clients: int) -> int:
    """Most connections of a server to which as many clients come as may join a run."""
    return 2 * max_clients + MORE_CONNECTIONS


def allow_connections(count: int) -> None:
    """Let this process open as many files as its system allows, one for each connection. Raises UsageError where those are too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if resource.RLIM_INFINITY != most < count + OWN_FILES:
        text = f"a server of {count} connections needs {count + OWN_FILES} open files, this system allows a process {most} (`ulimit -Hn`)"
        raise UsageError(f"{text}; raise that, or lower broker.max_clients")


def has_input(socket: Any) -> bool:
    """True when a message can be received now; asks the socket and not the system, at a tenth of what a poll takes."""
    return bool(socket.getsockopt(EVENTS) & POLLIN)


def describe(peer: bytes) -> str:
    """A socket identity for a person: those of our clients are NAME/INSTANCE, others are made up by libzmq."""
    text = peer.decode(errors="replace")
    return f"client {text}" if text.isprintable() and "\ufffd" not in text else f"a client without a name ({peer.hex()})"


def _property(frame: Any, name: str) -> str:
    """What libzmq knows of the connection that a frame came through; empty where it does not."""
    try:
        return "" if frame is None else str(frame.get(name))
    except zmq.ZMQError:
        return ""


def _grant_of(keyring: Keyring, user: str) -> Grant:
    """What the key of a connection may do now: the list may have changed since it was let in."""
    grant = keyring.grants.get(user)
    if grant is None:
        raise _forbidden("the key of this connection is revoked or was replaced; `slimebus keys ls` on the broker's machine shows the list")
    return grant


def _check_may(grant: Grant, header: envelope.Header, message: Message) -> None:
    if header.type not in grant.may:
        raise _forbidden(f"key {grant.name!r} has the role {grant.role}, which may not send {header.type!r}")
    if grant.client and header.sender != grant.client and header.type not in PULL:
        raise _forbidden(f"key {grant.name!r} may speak as {grant.client!r} only, not as {header.sender[:64]!r} (--worker-name)")
    if isinstance(message, Hello) and message.role not in JOINS_AS[grant.role]:
        raise _forbidden(f"key {grant.name!r} has the role {grant.role}, which may not join as {message.role[:64]!r}")


def _forbidden(text: str) -> SlimebusError:
    return SlimebusError(text, code="forbidden")


def bind_socket(socket: Any, address: str, *, patience_s: float = 0.0) -> str:
    """Bind and return the address that others can use. Raises UsageError naming the address and the way out.

    patience_s: how long to wait for an address that this process has just released.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return _bind(socket, address)
        except UsageError as bad:
            if bad.code != "address_in_use" or time.monotonic() >= deadline:
                raise
            time.sleep(0.01)


def _bind(socket: Any, address: str) -> str:
    try:
        if "[" in address:
            socket.ipv6 = True
        socket.bind(address.replace("localhost", "127.0.0.1"))
    except zmq.ZMQError as bad:
        if bad.errno == zmq.EADDRINUSE:
            text = f"address {address} is in use by another process; stop it or choose another port"
            raise UsageError(text, code="address_in_use") from None
        raise UsageError(f"cannot bind {address}: {bad.strerror}; expected tcp://HOST:PORT with an address of this machine") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

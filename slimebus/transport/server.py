"""A ROUTER that hands out requests in bursts and sends replies when told to.

What does not parse is counted, logged with its peer, answered with an error where that is possible, and never ends the
process. The owner decides when to reply, so it can make a whole burst durable first.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from slimebus import envelope
from slimebus.errors import ProtocolError, SlimebusError, UsageError
from slimebus.messages import TYPES, Error, Hello, Message
from slimebus.security.allow_list import Grant
from slimebus.security.keyring import Keyring
from slimebus.security.roles import JOINS_AS, PULL
from slimebus.transport.curve import serve_curve
from slimebus.transport.doorman import Doorman
from slimebus.transport.patience import LIMIT, Patience
from slimebus.transport.unsent import TRACKED_BYTES, Unsent

log = logging.getLogger("slimebus.transport")

ZERO_COPY_BYTES = 16 * 1024
"""Below this, handing a frame over costs more than copying it. libzmq gives a larger frame memory of its own, so that a view that is
kept holds no more than the frame."""
DONTWAIT, MORE, POLLIN = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.POLLIN)
"""As plain numbers: combining the enumeration's members takes longer than sending a frame."""
MAX_JUNK = 4
"""Messages of a burst that may turn out to be nothing, once there is a request that waits for its answer."""
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_REPLIES = 1024
"""Replies that wait for one peer; more than a burst, so that only one that reads none has more."""
PUT_OFF = "what you asked for before is not taken yet, and there is no room for more (broker.unsent_mib)"
SAY_EVERY_S = 0.2
HANDSHAKE_MS = 10_000
"""A connection that has not said by then who it is, is closed."""
REBIND_S = 5.0


class Request(msgspec.Struct, frozen=True, gc=False):
    """One message as it came: `peer` is the socket identity to answer to, `key` the name of the key it came under (empty: no keys)."""

    peer: bytes
    header: envelope.Header
    message: Message
    bulk: Sequence[Any]
    key: str = ""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a server holds in memory at most, besides MAX_REPLIES replies that wait for one peer.

    max_connections: open at once. max_queued: messages of one connection that wait to be looked at, before TCP makes its sender
    wait. burst_bytes: bulk after which a burst ends: whoever asks for little waits for no more than so much to reach the disk, and at
    some hundred megabytes a second an fsync costs little beside it. unsent_bytes: of large replies on their way (transport/unsent.py).
    """

    max_connections: int = 2048
    max_queued: int = 256
    burst_bytes: int = 4 << 20
    unsent_bytes: int = 1024 << 20


class Server:
    """A bound ROUTER socket. `endpoint` is the address it got (port 0 binds any free port).

    keyring: whose keys may connect and what they may ask for, encrypted; None lets everyone in, in the clear.

    `refused` counts what was refused or hit a bound, by its name.
    """

    def __init__(
        self,
        bind: str,
        *,
        run: str = "",
        name: str = "broker",
        types: Mapping[str, type[Message]] = TYPES,
        burst: int = 256,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        limits: Limits | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        self.run, self.name, self.types, self.burst, self.keyring = run, name, types, burst, keyring
        self.limits = limits = limits or Limits()
        self.unsent = Unsent(limits.unsent_bytes)
        self._silent_until = 0.0
        self._user = ""  # the public key of the connection that the message in hand came through
        self.refused: Counter[str] = Counter()
        self.patience = Patience()
        self.context = zmq.Context()
        self.doorman = Doorman(self.context, keyring, max_connections=limits.max_connections, refused=self.refused)
        self.socket = self.context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.socket.linger = 200
        self.socket.maxmsgsize = max_message_bytes
        self.socket.rcvhwm, self.socket.sndhwm = limits.max_queued, MAX_REPLIES
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply that has no place is an error, not a silent loss
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its identity
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self.doorman.guard(self.socket)
        try:
            self.endpoint = bind_socket(self.socket, bind)
        except UsageError:
            self.close()
            raise
        self.doorman.start()

    def wait(self, timeout_s: float) -> bool:
        """True once something can be received, False after `timeout_s`."""
        if has_input(self.socket):
            return True
        return bool(self._poller.poll(max(0, round(timeout_s * 1000))))

    def receive(self, timeout_s: float) -> list[Request]:
        """Up to `burst` requests, or `limits.burst_bytes` of them; waits at most `timeout_s` for the first. Nonsense makes none wait."""
        requests: list[Request] = []
        size_bytes = 0
        if not self.wait(timeout_s):
            return requests
        for taken in range(self.burst):
            if requests and taken - len(requests) >= MAX_JUNK:
                break
            try:
                frames = self._receive_frames()
            except zmq.Again:
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
        frames: list[Any] = [self.socket.recv(DONTWAIT)]
        has_more = bool(self.socket.getsockopt(zmq.RCVMORE))
        self._user = ""
        while has_more:  # a message is there as a whole or not at all, so none of these waits
            frame = self.socket.recv(0, copy=False)
            if self.keyring is not None and len(frames) == 1:
                self._user = _user_of(frame)
            frames.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer)
            has_more = frame.more
        return frames

    def _parse(self, frames: list[Any]) -> Request | None:
        peer, frames = frames[0], frames[1:]
        if self.patience.is_lost_with(peer):
            self.refused["unread"] += 1
            return None
        request_id = 0
        try:
            if not frames:
                raise ProtocolError("a message without frames")
            if len(frames) > envelope.MAX_FRAMES:
                raise ProtocolError(f"{len(frames)} frames, at most {envelope.MAX_FRAMES}")
            header = envelope.decode_header(frames[0])
            request_id = header.id
            held = None if self.keyring is None else _held(self.keyring, self._user)
            message = envelope.decode_body(header, self.types)
            if held is not None:
                _check_may(held, header, message)
            return Request(peer, header, message, frames[1:], "" if held is None else held.name)
        except SlimebusError as bad:
            self.refused[bad.code] += 1
            if self.patience.is_worth_a_line(peer):
                log.warning("message from peer %s refused: %s", peer.hex(), bad.text)
            self.answer(peer, request_id, envelope.error_reply(bad))
            return None

    def reply(self, request: Request, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Answer a request; a peer that is gone or not reading is counted, not waited for."""
        self.answer(request.peer, request.header.id, message, bulk)

    def answer(self, peer: bytes, request_id: int, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Answer request `request_id` of `peer`, however long ago it came."""
        if isinstance(message, Error) and not message.retryable and self.patience.refused(peer):
            log.warning("peer %s was refused %d times, the last: %s; it is not listened to for a while", peer.hex(), LIMIT, message.text)
        try:
            header = envelope.encode(message, id=request_id, run=self.run, sender=self.name)
        except ProtocolError as bad:
            log.error("reply too large: %s", bad.text)
            bulk = ()
            header = envelope.encode(Error(code=bad.code, text=bad.text), id=request_id, run=self.run, sender=self.name)
        size = sum(map(len, bulk)) if bulk else 0
        if size >= TRACKED_BYTES:
            self._answer_large(peer, request_id, header, bulk, size)
            return
        try:
            self._send([peer, header, *bulk])
        except zmq.ZMQError as bad:
            self._count_unsent(peer, bad)

    def _answer_large(self, peer: bytes, request_id: int, header: bytes, bulk: Sequence[Any], size: int) -> None:
        """Hand a large reply over if there is room for it; else have the peer ask again when it has taken the one before."""
        if not self.unsent.has_room(peer, size):
            self._count("unsent_mib", "reply of %d bytes to peer %s put off: %d wait already", size, peer.hex(), self.unsent.total_bytes)
            self.answer(peer, request_id, Error(code="busy", text=PUT_OFF, retryable=True))
            return
        try:
            self._send([peer, header, *bulk[:-1], self.unsent.frame(peer, bulk[-1], size)])
        except zmq.ZMQError as bad:
            self.unsent.take_back(peer)
            self._count_unsent(peer, bad)

    def _count_unsent(self, peer: bytes, bad: zmq.ZMQError) -> None:
        is_gone = bad.errno == zmq.EHOSTUNREACH
        text = "it is gone" if is_gone else f"{MAX_REPLIES} wait for it already"
        self._count("peer_gone" if is_gone else "max_replies", "reply to peer %s not sent: %s", peer.hex(), text)

    def _count(self, reason: str, text: str, *words: object) -> None:
        """Count what was refused; say it, but not so often that the log grows with what someone sends."""
        self.refused[reason] += 1
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + SAY_EVERY_S
            log.warning(text + " (%s: %d so far)", *words, reason, self.refused[reason])

    def bounds(self) -> dict[str, dict[str, Any]]:
        """Name of each bound of this socket -> limit, used, hits."""
        mib = 1 << 20
        limits: dict[str, tuple[int, int | None]] = {
            "max_connections": (self.doorman.max_connections, self.doorman.num_connections),
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
        for frame in frames[:-1]:
            self.socket.send(frame, DONTWAIT | MORE, copy=len(frame) < ZERO_COPY_BYTES)
        last = frames[-1]
        self.socket.send(last, DONTWAIT, copy=not isinstance(last, zmq.Frame) and len(last) < ZERO_COPY_BYTES)

    def close(self) -> None:
        """Release the address."""
        self.doorman.close()
        self.socket.close()
        self.context.term()


def has_input(socket: Any) -> bool:
    """True when a message can be received now; asks the socket and not the system, at a tenth of what a poll takes."""
    return bool(socket.getsockopt(zmq.EVENTS) & POLLIN)


def _user_of(frame: Any) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # the frame has none
        return ""


def _held(keyring: Keyring, user: str) -> Grant:
    """What the key of a connection may do now: the list may have changed since it was let in."""
    held = keyring.grants.get(user)
    if held is None:
        raise SlimebusError(
            "the key of this connection is revoked or was replaced; `slimebus keys ls` on the broker's machine shows the list",
            code="forbidden",
        )
    return held


def _check_may(held: Grant, header: envelope.Header, message: Message) -> None:
    if header.type not in held.may:
        raise SlimebusError(f"key {held.name!r} has the role {held.role}, which may not send {header.type!r}", code="forbidden")
    if held.client and header.sender != held.client and header.type not in PULL:
        raise SlimebusError(
            f"key {held.name!r} may speak as {held.client!r} only, not as {header.sender[:64]!r} (--worker-name)", code="forbidden"
        )
    if isinstance(message, Hello) and message.role not in JOINS_AS[held.role]:
        raise SlimebusError(f"key {held.name!r} has the role {held.role}, which may not join as {message.role[:64]!r}", code="forbidden")


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
            raise UsageError(
                f"address {address} is in use by another process; stop it or choose another port", code="address_in_use"
            ) from None
        raise UsageError(f"cannot bind {address}: {bad.strerror}; expected tcp://HOST:PORT with an address of this machine") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

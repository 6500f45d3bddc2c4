"""A ROUTER that hands out requests in bursts and sends replies when told to.

What does not parse is counted, logged with its peer, answered with an error where that is possible, and never ends the
process. The owner decides when to reply, so it can make a whole burst durable first.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import zmq

from slimebus import envelope
from slimebus.errors import ProtocolError, SlimebusError, UsageError
from slimebus.messages import TYPES, Error, Message

log = logging.getLogger("slimebus.transport")

ZERO_COPY_BYTES = 16 * 1024
"""Below this, handing a frame over costs more than copying it. libzmq gives a larger frame memory of its own, so that a view that is
kept holds no more than the frame."""
DONTWAIT, MORE, POLLIN = int(zmq.DONTWAIT), int(zmq.SNDMORE), int(zmq.POLLIN)
"""As plain numbers: combining the enumeration's members takes longer than sending a frame."""
DEFAULT_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class Request(msgspec.Struct, frozen=True, gc=False):
    """One message as it came: `peer` is the socket identity to answer to."""

    peer: bytes
    header: envelope.Header
    message: Message
    bulk: Sequence[Any]


class Server:
    """A bound ROUTER socket. `endpoint` is the address it got (port 0 binds any free port)."""

    def __init__(
        self,
        bind: str,
        *,
        run: str = "",
        name: str = "broker",
        types: Mapping[str, type[Message]] = TYPES,
        burst: int = 256,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        max_queued: int = 4096,
    ) -> None:
        self.run, self.name, self.types, self.burst = run, name, types, burst
        self.refused: Counter[str] = Counter()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self.socket.linger = 200
        self.socket.maxmsgsize = max_message_bytes
        self.socket.rcvhwm = self.socket.sndhwm = max_queued
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects keeps its identity
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
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

    def receive(self, timeout_s: float) -> list[Request]:
        """Up to `burst` requests; waits at most `timeout_s` for the first."""
        requests: list[Request] = []
        if not self.wait(timeout_s):
            return requests
        for _ in range(self.burst):
            try:
                frames = self._receive_frames()
            except zmq.Again:
                break
            request = self._parse(frames)
            if request is not None:
                requests.append(request)
        return requests

    def _receive_frames(self) -> list[Any]:
        """One message: bytes, and views of what is too large to copy. Raises zmq.Again when there is none."""
        frames: list[Any] = [self.socket.recv(DONTWAIT)]
        has_more = bool(self.socket.getsockopt(zmq.RCVMORE))
        while has_more:  # a message is there as a whole or not at all, so none of these waits
            frame = self.socket.recv(0, copy=False)
            frames.append(frame.bytes if len(frame) < ZERO_COPY_BYTES else frame.buffer)
            has_more = frame.more
        return frames

    def _parse(self, frames: list[Any]) -> Request | None:
        peer, frames = frames[0], frames[1:]
        request_id = 0
        try:
            if not frames:
                raise ProtocolError("a message without frames")
            if len(frames) > envelope.MAX_FRAMES:
                raise ProtocolError(f"{len(frames)} frames, at most {envelope.MAX_FRAMES}")
            header = envelope.decode_header(frames[0])
            request_id = header.id
            return Request(peer, header, envelope.decode_body(header, self.types), frames[1:])
        except SlimebusError as bad:
            self.refused[bad.code] += 1
            log.warning("message from peer %s refused: %s", peer.hex(), bad.text)
            self.answer(peer, request_id, envelope.error_reply(bad))
            return None

    def reply(self, request: Request, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Answer a request; a peer that is gone or not reading is counted, not waited for."""
        self.answer(request.peer, request.header.id, message, bulk)

    def answer(self, peer: bytes, request_id: int, message: Message, bulk: Sequence[Any] = ()) -> None:
        """Answer request `request_id` of `peer`, however long ago it came."""
        try:
            header = envelope.encode(message, id=request_id, run=self.run, sender=self.name)
        except ProtocolError as bad:
            log.error("reply too large: %s", bad.text)
            bulk = ()
            header = envelope.encode(Error(code=bad.code, text=bad.text), id=request_id, run=self.run, sender=self.name)
        try:
            self._send([peer, header, *bulk])
        except zmq.ZMQError as bad:
            self.refused["reply_unsent"] += 1
            log.warning("reply to peer %s not sent: %s", peer.hex(), bad)

    def _send(self, frames: list[Any]) -> None:
        """Send without waiting. Only the first frame can be refused; the others go where it went."""
        for frame in frames[:-1]:
            self.socket.send(frame, DONTWAIT | MORE, copy=len(frame) < ZERO_COPY_BYTES)
        self.socket.send(frames[-1], DONTWAIT, copy=len(frames[-1]) < ZERO_COPY_BYTES)

    def close(self) -> None:
        """Release the address."""
        self.socket.close()
        self.context.term()


def has_input(socket: Any) -> bool:
    """True when a message can be received now; asks the socket and not the system, at a tenth of what a poll takes."""
    return bool(socket.getsockopt(zmq.EVENTS) & POLLIN)


def bind_socket(socket: Any, address: str) -> str:
    """Bind and return the address that others can use. Raises UsageError naming the address and the way out."""
    try:
        socket.bind(address.replace("localhost", "127.0.0.1"))
    except zmq.ZMQError as bad:
        if bad.errno == zmq.EADDRINUSE:
            raise UsageError(
                f"address {address} is in use by another process; stop it or choose another port", code="address_in_use"
            ) from None
        raise UsageError(f"cannot bind {address}: {bad.strerror}; expected tcp://HOST:PORT with an address of this machine") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))

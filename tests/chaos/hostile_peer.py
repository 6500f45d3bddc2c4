"""One hostile process.

    python hostile_peer.py nonsense ADDRESS SEED MESSAGES     from a seed, as fast as the broker takes it
    python hostile_peer.py flood ADDRESS SECONDS              requests with answers that nobody reads

Prints one JSON line at the end: how many messages of each kind it sent and how many answers came.
"""

import contextlib
import json
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

import msgpack
import msgspec
import zmq

from slimebus.bus import messages as m

Frames = list[bytes]
RUN = "live"
CONNECTIONS, REQUESTS, EVERY_S = 20, 20, 0.05
"""Of a flood: each connection asks for the status so many times, and again after so many seconds."""

TYPES = [*sorted(m.TYPES), "chunk_request", "teleport"]
KEYS = sorted({field.name for message in m.TYPES.values() for field in msgspec.structs.fields(message)})
NUMBERS = (0, 1, -1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**64 - 1, -(2**63), 1e308, -1e308, float("nan"), float("inf"), 5e-324)
TEXTS = ("", "x", "0/1", "0/0", "\x00", "é" * 40, "../../etc/passwd", "'; drop table groups; --", "${jndi:x}", "a" * 5000)


class Nonsense:
    """Messages that no honest peer sends; some are of the broker's own run, so that they get past the first check."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.sent: list[Frames] = []
        self.kinds: dict[str, tuple[int, Callable[[], Frames]]] = {
            "random bytes": (10, self.random_bytes),
            "empty": (3, self.empty),
            "deep": (3, self.deep),
            "oversized header": (1, self.oversized_header),
            "oversized frame": (0, self.large_frame),
            "many frames": (1, self.many_frames),
            "wrong types": (25, self.wrong_types),
            "truncated": (15, self.truncated),
            "flipped": (10, self.flipped),
            "replayed": (10, self.replayed),
            "absurd numbers": (15, self.absurd),
            "frame count mismatch": (5, self.mismatched_put),
            "wrong run or epoch": (8, self.stranger),
            "strangers' hello": (2, self.hello),
        }
        self._names = list(self.kinds)
        self._weights = [weight for weight, _ in self.kinds.values()]

    def next(self) -> tuple[str, Frames]:
        """A kind and its frames."""
        (name,) = self.chance.choices(self._names, self._weights)
        frames = self.kinds[name][1]()
        if len(self.sent) < 256:
            self.sent.append(frames)
        elif sum(map(len, frames)) < 10_000:
            self.sent[self.chance.randrange(256)] = frames
        return name, frames

    def random_bytes(self) -> Frames:
        return [self.chance.randbytes(self.chance.randint(0, 300)) for _ in range(self.chance.randint(1, 5))]

    def empty(self) -> Frames:
        return [b""] * self.chance.randint(1, 4)

    def deep(self) -> Frames:
        opening = self.chance.choice([b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
        deep = opening * self.chance.randint(10, 20_000)
        if self.chance.random() < 0.5:
            return [deep[:60_000]]
        return [b"\x84\xa1v\x01\xa4type\xa6status\xa2id\x01\xa4body" + deep[:60_000]]

    def oversized_header(self) -> Frames:
        return [b"\x81\xa4type" * 20_000]

    def large_frame(self) -> Frames:
        return [self.header("put", {}), bytes(8_000_000)]

    def many_frames(self) -> Frames:
        return [self.header("put", {})] + [b""] * self.chance.randint(100, 3000)

    def value(self, depth: int = 0) -> Any:
        chance = self.chance
        match chance.randint(0, 9 if depth < 3 else 5):
            case 0 | 1:
                return chance.choice(NUMBERS)
            case 2 | 3:
                return chance.choice(TEXTS)
            case 4:
                return chance.choice([None, True, False])
            case 5:
                return chance.randbytes(chance.randint(0, 20))
            case 6 | 7:
                return [self.value(depth + 1) for _ in range(chance.randint(0, 4))]
            case _:
                return {chance.choice(KEYS): self.value(depth + 1) for _ in range(chance.randint(0, 4))}

    def header(self, kind: str, told: Any, **changes: Any) -> bytes:
        chance = self.chance
        fields = {"v": 1, "type": kind, "id": chance.randint(0, 99), "body": told, "run": RUN, "sender": "evil", "epoch": 0}
        try:
            return bytes(msgpack.packb(fields | changes))
        except (ValueError, OverflowError):
            return b"\xc1"

    def wrong_types(self) -> Frames:
        chance = self.chance
        body = {chance.choice(KEYS): self.value() for _ in range(chance.randint(0, 8))}
        changes = {chance.choice(["v", "type", "id", "body", "run", "sender", "epoch"]): self.value()} if chance.random() < 0.4 else {}
        return [self.header(chance.choice(TYPES), body, **changes)]

    def truncated(self) -> Frames:
        frame = self.absurd()[0]
        return [frame[: self.chance.randrange(len(frame))]]

    def flipped(self) -> Frames:
        frame = bytearray(self.absurd()[0])
        for _ in range(self.chance.randint(1, 4)):
            frame[self.chance.randrange(len(frame))] ^= self.chance.randint(1, 255)
        return [bytes(frame)]

    def replayed(self) -> Frames:
        return self.chance.choice(self.sent) if self.sent else [b"replay"]

    def number(self) -> int:
        return self.chance.choice([0, 1, -1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)])

    def body_of(self, kind: str) -> dict[str, Any]:
        chance, number = self.chance, self.number
        seconds = chance.choice([0.0, -1.0, 1e300, float("nan"), float("inf"), 0.001])
        bodies: dict[str, dict[str, Any]] = {
            "hello": {"role": chance.choice(["rollout", "client", "root", ""]), "instance": "i", "protocol": number(), "oldest": number()},
            "heartbeat": {"leases": [number()] * chance.choice([0, 1, 3000]), "serving": number(), "state": chance.choice(TEXTS)},
            "lease": {"want": number(), "wait_s": seconds, "serving": number(), "lineage": chance.choice(TEXTS), "needs_weights": False},
            "put": {
                "group": chance.choice(TEXTS),
                "lease": number(),
                "lineage": "",
            },
            "give_back": {
                "group": "0/1",
                "lease": number(),
                "outcome": chance.choice(["requeue", "drop", "fail", "?"]),
                "reason": "x" * 999,
            },
            "resume": {"step": number(), "version": number(), "lineage": chance.choice(TEXTS)},
            "publish": {"lineage": "l", "version": number(), "publishers": ["tcp://x:1"] * chance.choice([0, 1, 2000]), "digest": "d"},
            "batch": {"step": number(), "wait_s": seconds},
            "fetch": {"groups": [chance.choice(TEXTS)] * chance.choice([0, 1, 1000])},
            "commit": {"step": number(), "checkpoint": number(), "unused": {"0/1": "x"}, "metrics": {"loss": seconds}},
            "finish": {"reason": chance.choice(TEXTS)},
            "evaluate": {"key": str(number()), "datasets": ["none"], "wait_s": seconds},
        }
        return bodies[kind]

    def absurd(self) -> Frames:
        kind = self.chance.choice(
            ["heartbeat", "lease", "put", "give_back", "resume", "publish", "batch", "fetch", "commit", "finish", "evaluate"]
        )
        return [self.header(kind, self.body_of(kind), sender=self.chance.choice(["evil", "good", "trainer", "", "x" * 300]))]

    def mismatched_put(self) -> Frames:
        frames = (self.chance.randbytes(16) for _ in range(self.chance.randint(0, 9)))
        return [self.header("put", self.body_of("put")), self.table(), *frames]

    def table(self) -> bytes:
        """Of samples, with wrong numbers in it."""
        chance, number = self.chance, self.number
        count = chance.choice([0, 1, 8])
        field = {"name": "tokens", "dtype": chance.choice(["int32", "object", ""]), "shapes": [[number()] * chance.randint(0, 4)]}
        columns = {
            "num_tokens": [number()] * count,
            "versions": [[[number(), number()]] * chance.randint(0, 3)] * count,
            "fields": [field] * chance.choice([0, 1, 3]),
            "reward": [chance.choice([0.0, float("nan"), float("inf")])] * chance.choice([0, count]),
            "temperature": [chance.choice([0.0, -1.0, float("nan"), 0.7])] * chance.choice([0, count]),
        }
        return bytes(msgpack.packb(columns))

    def stranger(self) -> Frames:
        run = self.chance.choice(["", "other", "x" * 1000])
        return [self.header("lease", self.body_of("lease"), run=run, epoch=self.number(), sender=f"evil-{self.chance.randint(0, 9)}")]

    def hello(self) -> Frames:
        body = self.body_of("hello") | {"instance": str(self.chance.random())}
        if self.chance.random() < 0.5:
            body |= {"protocol": 1, "oldest": 1}
        return [self.header("hello", body, sender=f"evil-{self.chance.randint(0, 10**6)}")]


class RawTcp:
    """Connections that do not even speak ZMTP, or stop in the middle of it."""

    GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
    READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

    def __init__(self, address: str, seed: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.where, self.chance = (host, int(port)), random.Random(seed)
        self.idle: list[socket.socket] = []

    def strike(self) -> None:
        """One bad connection; some stay open and silent for a while."""
        chance = self.chance
        hello = self.GREETING + self.READY
        oversized = b"\x02" + struct.pack(">Q", chance.choice([2**63, 2**40, 2**33]))
        bad: list[bytes] = [
            b"",
            chance.randbytes(chance.randint(1, 500)),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            self.GREETING[: chance.randint(1, 63)],
            self.GREETING,
            self.GREETING + chance.randbytes(100),
            hello + chance.randbytes(chance.randint(1, 2000)),
            hello + oversized,
            hello + b"\x01\x05ab",
            hello + b"\x04\xff",
        ]
        with contextlib.suppress(OSError):
            one = socket.create_connection(self.where, timeout=2.0)
            one.settimeout(2.0)
            self.idle.append(one)
            one.sendall(chance.choice(bad))
        while len(self.idle) > 50:
            self.idle.pop(chance.randrange(len(self.idle))).close()

    def close(self) -> None:
        for one in self.idle:
            one.close()


def flood(address: str, seconds: float) -> NoReturn:
    """20 connections ask for the status for so long; then the process vanishes, with their answers unread."""
    context, sent = zmq.Context(), 0
    sockets = [context.socket(zmq.DEALER) for _ in range(CONNECTIONS)]
    for one in sockets:
        one.rcvhwm = 1
        one.connect(address)
    until, request = time.monotonic() + seconds, Nonsense(0)
    while time.monotonic() < until:
        for one in sockets * REQUESTS:
            with contextlib.suppress(zmq.Again):
                one.send(request.header("status", {}, sender="deaf"), zmq.NOBLOCK)
                sent += 1
        time.sleep(EVERY_S)
    print(json.dumps({"sent": {"status": sent}, "answers": 0}), flush=True)
    os._exit(0)  # from here, where no socket is closed in order: the system resets connections that hold unread answers


def attack(address: str, seed: int, messages: int) -> dict[str, Any]:
    """Send it all over a few connections that come and go; returns what was sent and heard."""
    nonsense, raw, chance = Nonsense(seed), RawTcp(address, seed), random.Random(seed)
    sent: Counter[str] = Counter()
    answers = 0
    turns = 80 if seed % 2 else 4000  # a peer that is refused again and again is not read any more: most of it comes from new ones
    started = time.monotonic()
    with zmq.Context() as context:
        peers: list[Any] = []
        for i in range(messages):
            if i % turns == 0:
                if len(peers) >= 4:
                    peers.pop(0).close()
                peers.append(_peer(context, address))
            if i % 200 == 0:
                raw.strike()
                sent["raw tcp"] += 1
            kind, frames = nonsense.next()
            peer = chance.choice(peers)
            try:
                peer.send_multipart(frames)
                sent[kind] += 1
            except zmq.Again:
                sent["not taken in time"] += 1
            while peer.poll(0):
                peer.recv_multipart(zmq.NOBLOCK)
                answers += 1
        deadline = time.monotonic() + 1.0
        for peer in peers:
            while peer.poll(max(0, round(1000 * (deadline - time.monotonic())))) and time.monotonic() < deadline:
                peer.recv_multipart(zmq.NOBLOCK)
                answers += 1
            peer.close()
    raw.close()
    return {"sent": dict(sent), "answers": answers, "seconds": round(time.monotonic() - started, 2)}


def _peer(context: Any, address: str) -> Any:
    peer = context.socket(zmq.DEALER)
    peer.linger = 1000
    peer.sndhwm = peer.rcvhwm = 1000
    peer.sndtimeo = 2000
    peer.connect(address)
    return peer


if __name__ == "__main__":
    os.nice(19)  # it would run on another machine: making nonsense must not take the honest worker's processor
    if sys.argv[1] == "flood":
        flood(sys.argv[2], float(sys.argv[3]))
    print(json.dumps(attack(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))), flush=True)

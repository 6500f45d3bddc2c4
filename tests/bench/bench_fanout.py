"""32 workers pull one version from a trainer, over links that all have one rate.

Each weight server, the trainer's and every worker's, stands behind a relay that lets a common number of bytes a second through.
All of it runs in this process, so the rate is low enough that the links are what limits and not the processor: the row says how much
of one core was used. (At 4 MiB/s, 32 workers need all of it, and the ratio says how fast Python is.)
"""

import asyncio
import statistics
import threading
import time

import numpy as np
from bench_row import Row, row

from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore

WORKERS, DEGREE, TURNS = 32, 2, 3
NUM_TENSORS, TENSOR_VALUES = 64, 1 << 15  # 4 MiB
RATE = 1 << 20
CHUNK_BYTES = 1 << 16
BLOCK_BYTES = 1 << 14


def rows() -> list[Row]:
    """Time of 32 workers over the time of one: medians of TURNS."""
    model = np.random.default_rng(0)
    tensors = {f"t{i:02d}": model.integers(0, 65536, TENSOR_VALUES).astype(np.uint16) for i in range(NUM_TENSORS)}
    one, many, used = [], [], []
    with Relays() as relays:
        for _ in range(TURNS):
            one.append(seconds(relays, tensors, 1))
            before_s = time.process_time()
            many.append(seconds(relays, tensors, WORKERS))
            used.append(time.process_time() - before_s)
    one_s, many_s = statistics.median(one), statistics.median(many)
    busy = sum(used) / sum(many)
    return [row("fanout32_ratio", many_s, f"s, {busy:.0%} of a core", one_s, "<= 2.5")]


def seconds(relays: "Relays", tensors: dict[str, np.ndarray], count: int) -> float:
    """From the moment that all workers ask until the last one has a verified version."""
    store = VersionStore()
    store.publish(tensors)
    publisher = WeightServer(store, degree=DEGREE)
    address = relays.in_front_of(publisher.endpoint)
    servers, pullers = [], []
    for _ in range(count):
        payloads = RelayPayloads()
        servers.append(WeightServer(payloads))
        serves = relays.in_front_of(servers[-1].endpoint)
        pullers.append(WeightPuller([address], relay=payloads, serves=serves, chunk_bytes=CHUNK_BYTES, threads=1))
    threads = [threading.Thread(target=puller.pull, kwargs={"deadline_s": 120.0}) for puller in pullers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    for closable in (*pullers, *servers, publisher):
        closable.close()
    return elapsed


class Relays:
    """TCP relays on one event loop; what a server sends passes at `rate` bytes a second in all, what it receives is not limited."""

    def __init__(self, rate: int = RATE) -> None:
        self.rate = rate
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "Relays":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def in_front_of(self, endpoint: str, at: str = "127.0.0.1:0", *, free_bytes: int = 0) -> str:
        """The address of a new relay to a server, which may start later; its first `free_bytes` pass at once."""
        return asyncio.run_coroutine_threadsafe(self._open(endpoint, at, free_bytes), self._loop).result(5.0)

    async def _open(self, endpoint: str, at: str, free_bytes: int) -> str:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        bucket = Bucket(self.rate, free_bytes)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                upstream, downstream = await asyncio.open_connection(host, int(port))
            except OSError:  # it has not started, or has ended
                writer.close()
                return
            await asyncio.gather(pump(reader, downstream, None), pump(upstream, writer, bucket))

        own, _, own_port = at.rpartition(":")
        server = await asyncio.start_server(connected, own, int(own_port))
        return f"tcp://{own}:{server.sockets[0].getsockname()[1]}"


class Bucket:
    """Lets `rate` bytes a second through after the first `free_bytes`; who comes waits its turn."""

    def __init__(self, rate: int, free_bytes: int) -> None:
        self.rate, self.free_bytes = rate, free_bytes
        self._free_at = 0.0

    async def take(self, size: int) -> None:
        if self.free_bytes > 0:
            self.free_bytes -= size
            return
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size / self.rate
        await asyncio.sleep(self._free_at - now)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bucket: Bucket | None) -> None:
    """Copy until one side closes."""
    try:
        while data := await reader.read(BLOCK_BYTES):
            if bucket is not None:
                await bucket.take(len(data))
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()

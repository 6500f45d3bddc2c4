"""32 workers pull one version from a trainer, over links that all have one rate.

Each weight server, the trainer's and every worker's, stands behind a relay that lets a common number of bytes a second through.
All of it runs in this process, so the rate is low enough that the links are what limits and not the processor: the row says how much
of one core was used. (At 4 MiB/s, 32 workers need all of it, and the ratio says how fast Python is.)
"""

import statistics
import threading
import time

import numpy as np
from bench_row import Row, row
from slow_link import SlowLink

from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.store.version_store import VersionStore

WORKERS, DEGREE, TURNS = 32, 2, 3
NUM_TENSORS, TENSOR_VALUES = 64, 1 << 15  # 4 MiB
RATE = 1 << 20
CHUNK_BYTES = 1 << 16


def rows() -> list[Row]:
    """Time of 32 workers over the time of one: medians of TURNS."""
    model = np.random.default_rng(0)
    tensors = {f"t{i:02d}": model.integers(0, 65536, TENSOR_VALUES).astype(np.uint16) for i in range(NUM_TENSORS)}
    one, many, used = [], [], []
    for _ in range(TURNS):
        one.append(seconds(tensors, 1))
        before_s = time.process_time()
        many.append(seconds(tensors, WORKERS))
        used.append(time.process_time() - before_s)
    unit = f"s, {sum(used) / sum(many):.0%} of a core"
    return [row("fanout32_ratio", statistics.median(many), unit, statistics.median(one), "<= 2.5")]


def seconds(tensors: dict[str, np.ndarray], count: int) -> float:
    """From the moment that all workers ask until the last one has a verified version."""
    store = VersionStore()
    store.publish(tensors)
    publisher = WeightServer(store, degree=DEGREE)
    links, servers, pullers = [SlowLink(publisher.endpoint, RATE)], [], []
    for _ in range(count):
        payloads = RelayPayloads()
        servers.append(WeightServer(payloads))
        links.append(SlowLink(servers[-1].endpoint, RATE))
        serves = links[-1].endpoint
        pullers.append(WeightPuller([links[0].endpoint], relay=payloads, serves=serves, chunk_bytes=CHUNK_BYTES, threads=1))
    threads = [threading.Thread(target=puller.pull, kwargs={"deadline_s": 120.0}) for puller in pullers]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    for closable in (*pullers, *servers, publisher, *links):
        closable.close()
    return elapsed

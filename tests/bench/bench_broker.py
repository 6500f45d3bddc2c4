"""How fast the broker is, as ratios measured in one run: `bin/bench broker`.

A real broker process, load from processes of their own; what it is compared with takes turns with it, and medians count. A group is
8 samples of 35 kB (tests/bench/bench_load.py).
"""

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bench_peers
from bench_load import GROUP_BYTES, SAMPLES
from bench_process import BATCH_SIZE, ENVIRONMENT, BrokerProcess, load, measured, scratch, script, write_prompts
from bench_row import Row, row, within

PUTS = {"kind": "put", "workers": 4, "window": 8}
"""32 puts in flight."""
WORKERS = 256


def rows(quick: bool) -> list[Row]:
    """All measurements; quick: fewer turns, a tenth of the 10 GB, Redis with fsync as the only peer."""
    folder = scratch()
    try:
        prompts = write_prompts(folder / "prompts.jsonl", 100_000)
        turns, groups = (2, 256) if quick else (5, 512)
        return [
            *memory_rows(folder, prompts, turns, groups),
            *durable_rows(folder, prompts, turns, groups),
            *control_rows(folder, prompts, 3_000 if quick else 12_000, turns),
            *heartbeat_rows(folder, prompts, turns, 3_000 if quick else 12_000),
            *idle_rows(folder, prompts, 2_000 if quick else 10_000, 10.0 if quick else 20.0),
            *worker_rows(folder, prompts, turns, groups, 3.0 if quick else 10.0),
            *size_rows(folder, prompts, 1 if quick else 10),
            *bench_peers.rows(folder, prompts, turns, groups, quick=quick),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def median_of(turns: int, measures: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each measure, taken in turns after one that does not count."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(turns + 1):
        for name, measure in measures.items():
            value = measure()
            if turn:
                found[name].append(value)
    return {name: statistics.median(values) for name, values in found.items()}


def rate(found: dict[str, Any]) -> float:
    """Groups or messages a second."""
    count = found.get("groups", found.get("messages", 0))
    return float(count / found["seconds"])


# --- puts ---


def memory_rows(folder: Path, prompts: Path, turns: int, groups: int) -> list[Row]:
    """Puts into a broker in memory beside a ROUTER that sends the same bytes back, and one that only says ok."""
    broker = BrokerProcess(folder / "memory", "memory", prompts=prompts).train()
    bare = {kind: _bare(kind) for kind in ("echo", "acknowledge")}

    def put() -> float:
        found = rate(broker.load(**PUTS, groups=groups))
        broker.free(groups)
        return found

    try:
        found = median_of(turns, {"put": put} | {kind: _bare_put(address, groups) for kind, (_, address) in bare.items()})
    finally:
        broker.close()
        for process, _ in bare.values():
            process.kill()
            process.wait()
    return [
        row("put_memory_ratio", found["put"], "groups/s", found["echo"], ">= 0.7"),
        row("put_memory_vs_acknowledge", found["put"], "groups/s", found["acknowledge"], ""),
    ]


def _bare_put(address: str, groups: int) -> Callable[[], float]:
    return lambda: rate(load({**PUTS, "address": address, "bare": True, "groups": groups}))


def _bare(kind: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(script("bench_bare.py", kind), stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def durable_rows(folder: Path, prompts: Path, turns: int, groups: int) -> list[Row]:
    """Puts into a broker with fsync beside LMDB alone with as many groups a transaction.

    Both append to stores that grow; then, without a goal, both write where freed groups were, as in a run that goes on.
    """
    grow, burst = _durable(folder, prompts, turns, groups, "grow")
    reuse, _ = _durable(folder, prompts, turns, groups, "reuse")
    return [
        row("put_durable_ratio", grow["put"], "groups/s", grow["append"], ">= 0.9"),
        within("put_durable_samples_per_s", SAMPLES * grow["put"], "samples/s", ">=", 2000),
        row("put_durable_burst", burst, "groups a commit", 1.0, ""),
        row("put_durable_reuse_ratio", reuse["put"], "groups/s", reuse["append"], ""),
    ]


def _durable(folder: Path, prompts: Path, turns: int, groups: int, pages: str) -> tuple[dict[str, float], float]:
    """Groups a second of broker and LMDB, and the groups of a commit."""
    broker = BrokerProcess(folder / f"fsync-{pages}", "fsync", prompts=prompts).train()
    bare = folder / f"bare-{pages}"
    bursts: list[float] = []

    def put() -> float:
        before = broker.commits()
        done = broker.load(**PUTS, groups=groups)
        bursts.append(groups / max(1, broker.commits() - before - groups // WORKERS))  # leasing them took commits too
        if pages == "reuse":
            broker.free(groups)
        return rate(done)

    def append() -> float:
        return rate(measured("bench_bare.py", "lmdb", bare, groups, max(1, round(bursts[-1])), pages))

    try:
        return median_of(turns, {"put": put, "append": append}), statistics.median(bursts)
    finally:
        broker.close()
        shutil.rmtree(bare, ignore_errors=True)


# --- control ---


def control_rows(folder: Path, prompts: Path, messages: int, turns: int) -> list[Row]:
    """Leases and heartbeats of 16 workers in turn, with the whole broker on one core."""
    made = []
    for durability, name in (("fsync", "control_per_s"), ("memory", "control_memory_per_s")):
        broker = BrokerProcess(folder / f"control-{durability}", durability, prompts=prompts, core=0).train()
        try:
            measures = {only: _control(broker, messages, only) for only in ("", "lease", "heartbeat")}
            found = median_of(min(turns, 3), measures if durability == "fsync" else {"": measures[""]})
        finally:
            broker.close()
        made.append(within(name, found[""], "messages/s", ">=", 20_000) if durability == "fsync" else _plain(name, found[""], "messages/s"))
        made += [_plain(f"{kind}s_per_s", found[kind], "messages/s") for kind in found if kind]
    return made


def _control(broker: BrokerProcess, messages: int, only: str) -> Callable[[], float]:
    other = max(1, (os.cpu_count() or 2) - 1)
    return lambda: rate(broker.load(kind="control", workers=16, window=16, messages=messages, only=only, core=other))


def _plain(name: str, value: float, unit: str) -> Row:
    return row(name, value, unit, value, "")


def heartbeat_rows(folder: Path, prompts: Path, turns: int, messages: int) -> list[Row]:
    """Leases kept alive a second by heartbeats of workers that hold 64, with the whole broker on one core."""
    broker = BrokerProcess(folder / "beats", "fsync", prompts=prompts, core=0).train()
    try:
        found = median_of(turns, {"beats": lambda: rate(broker.load(kind="beats", workers=16, held=64, window=16, messages=messages))})
    finally:
        broker.close()
    return [within("heartbeats_64_leases_per_s", 64 * found["beats"], "leases/s", ">=", 30_000)]


def idle_rows(folder: Path, prompts: Path, workers: int, seconds: float) -> list[Row]:
    """Share of one core that workers cost to which nothing is leased: heartbeats every 2 s, a lease request that waits 10 s."""
    broker = BrokerProcess(folder / "idle", "fsync", prompts=prompts, max_clients=20_000, buffer_capacity=BATCH_SIZE).train()
    try:
        broker.load(kind="cycle", workers=1, window=8, groups=BATCH_SIZE)  # the buffer is full
        spec = {"kind": "idle", "address": broker.address, "workers": workers, "sockets": 50, "beat_s": 2.0, "lease_s": 11.0}
        with subprocess.Popen(script("bench_load.py", json.dumps({**spec, "seconds": seconds})), stdout=subprocess.PIPE, text=True) as load:
            assert load.stdout is not None
            assert json.loads(load.stdout.readline())["joined"] == workers
            before, began = broker.cpu_s(), time.perf_counter()
            done = json.loads(load.stdout.readline())
            share = (broker.cpu_s() - before) / (time.perf_counter() - began)
    finally:
        broker.close()
    assert done["sent"] >= 0.9 * seconds * workers * (1 / 2.0 + 1 / 11.0), f"the load could not keep up: {done}"
    return [within(f"workers_{workers // 1000}k", share, "of a core", "<=", 0.3)]


# --- many workers ---


def worker_rows(folder: Path, prompts: Path, turns: int, groups: int, seconds: float) -> list[Row]:
    """256 workers: what a lease waits while each makes a group a second with fsync, and throughput against one worker's."""
    broker = BrokerProcess(folder / "workers", "fsync", prompts=prompts).train()
    try:
        taken = broker.load(kind="paced", workers=WORKERS, period_s=1.0, seconds=seconds)["latencies_s"]
    finally:
        broker.close()
    p99_ms = {kind: 1000 * _p99(values) for kind, values in taken.items()}
    scale = {durability: _scale(folder, prompts, turns, groups, durability) for durability in ("fsync", "memory")}
    return [
        within("lease_p99_ms", p99_ms["lease"], "ms", "<=", 5),
        _plain("put_p99_ms", p99_ms["put"], "ms"),
        _plain("heartbeat_p99_ms", p99_ms["beat"], "ms"),
        row("scale_256_ratio", scale["fsync"]["many"], "groups/s", scale["fsync"]["one"], ">= 0.9"),
        row("scale_256_memory_ratio", scale["memory"]["many"], "groups/s", scale["memory"]["one"], ""),
    ]


def _scale(folder: Path, prompts: Path, turns: int, groups: int, durability: str) -> dict[str, float]:
    """Groups leased and put a second by one worker and by 256, with as many requests in flight."""
    broker = BrokerProcess(folder / f"scale-{durability}", durability, prompts=prompts).train()

    def cycle(workers: int) -> Callable[[], float]:
        def measure() -> float:
            found = rate(broker.load(kind="cycle", workers=workers, window=WORKERS // workers, groups=2 * groups))
            broker.free(2 * groups)
            return found

        return measure

    try:
        return median_of(turns, {"one": cycle(1), "many": cycle(WORKERS)})
    finally:
        broker.close()


def _p99(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


# --- size ---


def size_rows(folder: Path, prompts: Path, gigabytes: int) -> list[Row]:
    """A million prompts; a restart after kill -9 with gigabytes of samples in the buffer, none of it in the page cache."""
    million = write_prompts(folder / "million.jsonl", 1_000_000)
    broker = BrokerProcess(folder / "million", "fsync", prompts=million)
    start_s, rss_mib = broker.start_s, broker.rss_mib()
    broker.close()
    groups = 64 * round(gigabytes * 1e9 / GROUP_BYTES / 64)
    broker = BrokerProcess(folder / "restart", "os", prompts=prompts).train()
    try:
        broker.load(**PUTS, groups=groups)
        broker.stop()
        forget_pages(folder / "restart" / "run" / "broker" / "data.mdb")
        broker.start()
        held = broker.status()["groups"]["ready"]
        assert held == groups, f"{held} of {groups} groups are there after the restart"
    finally:
        broker.close()
    return [
        within("rss_1m_prompts_mib", rss_mib, "MiB", "<=", 1024),
        within("start_1m_prompts_s", start_s, "s", "<=", 10),
        within(f"restart_{gigabytes}gb_s", broker.start_s, "s", "<=", 3),
    ]


def forget_pages(path: Path) -> None:
    """Have the system write a file out and drop it from its cache."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)

"""How fast the broker is, as ratios measured in one run: `bin/bench broker`.

A real broker process, load from processes of their own; what it is compared with takes turns with it, and medians count. A group is
8 samples of 35 kB (tests/bench/bench_load.py).
"""

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_connections
import bench_peers
from bench_load import GROUP_BYTES, SAMPLES
from bench_process import ENVIRONMENT, BrokerProcess, load, measured, script
from bench_row import Row, median_of, plain, row, within

PUTS = {"kind": "put", "workers": 4, "window": 8}
"""32 puts in flight."""
WORKERS = 256


def rows(quick: bool) -> list[Row]:
    """All measurements; quick: fewer turns, a tenth of the 10 GB, Redis with fsync as the only peer."""
    with tempfile.TemporaryDirectory(prefix="slimebus-bench-") as scratch:
        folder, (turns, groups) = Path(scratch), (2, 256) if quick else (5, 512)
        return [
            *memory_rows(folder, turns, groups),
            *durable_rows(folder, turns, groups),
            *control_rows(folder, 3_000 if quick else 12_000, turns),
            *scale_rows(folder, turns, groups),
            *bench_connections.broker_rows(folder, quick),
            *size_rows(folder, 1 if quick else 10),
            *bench_peers.rows(folder, turns, groups, quick=quick),
        ]


def rate(found: dict[str, Any]) -> float:
    """Groups or messages a second."""
    count = found.get("groups", found.get("messages", 0))
    return float(count / found["seconds"])


# --- puts ---


def memory_rows(folder: Path, turns: int, groups: int) -> list[Row]:
    """Puts into a broker in memory beside a ROUTER that sends the same bytes back, and one that only says ok."""
    broker = BrokerProcess(folder / "memory", "memory").train()
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


def durable_rows(folder: Path, turns: int, groups: int) -> list[Row]:
    """Puts into a broker with fsync beside LMDB alone with as many groups a transaction.

    Both append to stores that grow; then, without a goal, both write where freed groups were, as in a run that goes on.
    """
    grow, burst = _durable(folder, turns, groups, "grow")
    reuse, _ = _durable(folder, turns, groups, "reuse")
    return [
        row("put_durable_ratio", grow["put"], "groups/s", grow["append"], ">= 0.9"),
        within("put_durable_samples_per_s", SAMPLES * grow["put"], "samples/s", ">=", 2000),
        row("put_durable_burst", burst, "groups a commit", 1.0, ""),
        row("put_durable_reuse_ratio", reuse["put"], "groups/s", reuse["append"], ""),
    ]


def _durable(folder: Path, turns: int, groups: int, pages: str) -> tuple[dict[str, float], float]:
    """Groups a second of broker and LMDB, and the groups of a commit."""
    broker = BrokerProcess(folder / f"fsync-{pages}").train()
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


def control_rows(folder: Path, messages: int, turns: int) -> list[Row]:
    """Leases and heartbeats of 16 workers in turn, and heartbeats of 16 that hold 64 leases each, with the whole broker on one core."""
    broker = BrokerProcess(folder / "control", core=0).train()
    try:
        measures = {only: _control(broker, messages, only=only) for only in ("", "lease", "heartbeat")}
        found = median_of(min(turns, 3), measures)
        beats = median_of(turns, {"": _control(broker, messages, only="heartbeat", held=64)})
    finally:
        broker.close()
    return [
        within("control_per_s", found[""], "messages/s", ">=", 25_000),
        *(plain(f"{kind}s_per_s", found[kind], "messages/s") for kind in found if kind),
        within("heartbeats_64_leases_per_s", 64 * beats[""], "leases/s", ">=", 30_000),
    ]


def _control(broker: BrokerProcess, messages: int, **spec: Any) -> Callable[[], float]:
    other = max(1, (os.cpu_count() or 2) - 1)
    return lambda: rate(broker.load(kind="control", workers=16, window=16, messages=messages, core=other, **spec))


# --- many workers ---


def scale_rows(folder: Path, turns: int, groups: int) -> list[Row]:
    """Throughput of 256 workers against one worker's."""
    scale = {durability: _scale(folder, turns, groups, durability) for durability in ("fsync", "memory")}
    return [
        row("scale_256_ratio", scale["fsync"]["many"], "groups/s", scale["fsync"]["one"], ">= 0.9"),
        row("scale_256_memory_ratio", scale["memory"]["many"], "groups/s", scale["memory"]["one"], ""),
    ]


def _scale(folder: Path, turns: int, groups: int, durability: str) -> dict[str, float]:
    """Groups leased and put a second by one worker and by 256, with as many requests in flight."""
    broker = BrokerProcess(folder / f"scale-{durability}", durability).train()

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


# --- size ---


def size_rows(folder: Path, gigabytes: int) -> list[Row]:
    """A million prompts; a restart after kill -9 with gigabytes of samples in the buffer, none of it in the page cache."""
    million, text = folder / "million.jsonl", "what is the sum of the digits of this number " * 3
    with million.open("w") as file:
        file.writelines(f'{{"prompt": "{text}{i}", "label": "{i % 97}", "metadata": {{"id": {i}}}}}\n' for i in range(1_000_000))
    broker = BrokerProcess(folder / "million", data={"prompt_data": [str(million)], "rollout_shuffle": False})
    start_s, rss_mib = broker.start_s, broker.rss_mib()
    broker.close()
    groups = 64 * round(gigabytes * 1e9 / GROUP_BYTES / 64)
    broker = BrokerProcess(folder / "restart", "os").train()
    try:
        broker.load(**PUTS, groups=groups)
        broker.kill()
        forget_pages(broker.run_dir / "broker" / "data.mdb")
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

"""Many workers at an even pace on connections of their own: what they cost, what they wait, and what an outage leaves behind.

`bin/bench connections` does it with 10,000 encrypted connections, for which a process must be allowed 25,400 open files (`ulimit -Hn`).
"""

import resource
import tempfile
import time
from pathlib import Path

from bench_process import BATCH_SIZE, BrokerProcess, Crowd
from bench_row import Row, absent, percentile, plain, within

from slimebus.bus.transport.server import MORE_CONNECTIONS, OWN_FILES
from slimebus.security import key_folder

OUTAGE_S, SETTLED_S, AFTER_S = 60.0, 3.0, 10.0
"""For so long the broker is away; from so many seconds after its first answer on it is as before, which is watched for so long."""
HINTS = 4
"""Announcements while the encrypted workers are watched."""
WORKERS = 256


def rows(quick: bool) -> list[Row]:
    """10,000 encrypted connections; quick: 2,000."""
    with tempfile.TemporaryDirectory(prefix="slimebus-bench-") as scratch:
        return curve_rows(Path(scratch), *((2_000, 5.0) if quick else (10_000, 20.0)), 10.0)


def broker_rows(folder: Path, quick: bool) -> list[Row]:
    """Those of `bin/bench broker`."""
    return [
        *idle_rows(folder, 2_000 if quick else min(10_000, most_workers()), 10.0 if quick else 20.0),
        *curve_rows(folder, 2_000, 5.0, 10.0 if quick else 20.0),
        *lease_rows(folder, 3.0 if quick else 10.0),
        *outage_rows(folder, 5.0 if quick else OUTAGE_S),
    ]


def most_workers() -> int:
    """For how many a broker may open files here."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if most == resource.RLIM_INFINITY else (most - OWN_FILES - MORE_CONNECTIONS) // 2 - 16


def full_broker(folder: Path, workers: int, keys: Path | None = None) -> BrokerProcess:
    """One that leases nothing to so many workers: its buffer is full. Raises RuntimeError where the system does not let it."""
    max_clients = workers * 5 // 4 if keys else workers + 16  # one key may have seven of eight places
    broker = BrokerProcess(folder, keys=keys, broker={"max_clients": max_clients, "buffer_capacity": BATCH_SIZE, "heartbeat_s": 2}).train()
    broker.load(kind="cycle", workers=1, window=8, groups=BATCH_SIZE, key=broker.key("rollout"))
    return broker


def idle_rows(folder: Path, workers: int, seconds: float) -> list[Row]:
    """Share of a core that workers on a few connections cost to which nothing is leased: heartbeats every 2 s, a lease that waits 10 s."""
    name = f"workers_{round(workers / 1000)}k"
    try:
        broker = full_broker(folder / "idle", workers)
    except RuntimeError as why:
        return [absent(name, str(why))]
    try:
        with Crowd(broker, 1, workers=workers, sockets=50, beat_s=2.0, lease_s=11.0, wait_s=10.0, seconds=seconds) as crowd:
            return [within(name, _core_share(broker, crowd, workers, seconds)[0], f"of a core, {workers:,} workers", "<=", 0.3)]
    finally:
        broker.close()


def curve_rows(folder: Path, workers: int, joined_s: float, seconds: float) -> list[Row]:
    """Workers with an encrypted connection each for requests and for hints, from four processes, to which nothing is leased."""
    name, keys = f"connections_{workers // 1000}k", folder / "keys"
    key_folder.init(keys)
    try:
        broker = full_broker(folder / "curve", workers, keys)
    except RuntimeError as why:
        return [absent(name, str(why))]
    try:
        crowd_of = {"workers": workers, "sockets": workers, "hints": True, "beat_s": 2.0, "lease_s": 11.0, "wait_s": 10.0}
        with Crowd(broker, 4, **crowd_of, seconds=seconds) as crowd:
            share, hints, beats = _core_share(broker, crowd, workers, seconds, HINTS)
            took_s = crowd.joined_s
    finally:
        broker.close()
    assert hints >= workers, f"{workers} subscribers heard {hints} hints"
    return [
        within(f"{name}_joined_s", took_s, "s", "<=", joined_s),
        within(name, share, "of a core", "<=", 0.5 * workers / 2_000),
        within(f"{name}_heartbeat_p99_ms", 1000 * percentile(beats), "ms", "<=", 50),
    ]


def _core_share(broker: BrokerProcess, crowd: Crowd, workers: int, seconds: float, hints: int = 0) -> tuple[float, int, list[float]]:
    """Share of a core, hints heard, and what heartbeats waited, while so many `hints` are published."""
    before, began = broker.cpu_s(), time.perf_counter()
    for number in range(hints):
        time.sleep(seconds / (hints + 1))
        broker.publish(number + 2)
    sent, heard, taken = crowd.finish()
    share = (broker.cpu_s() - before) / (time.perf_counter() - began)
    assert sent >= 0.9 * seconds * workers * (1 / 2.0 + 1 / 11.0), f"the load could not keep up: {sent} requests"
    return share, heard, [took_s for _, took_s in taken["beat"]]


def lease_rows(folder: Path, seconds: float) -> list[Row]:
    """What a lease waits while 256 workers make a group a second each, with fsync."""
    broker = BrokerProcess(folder / "paced").train()
    try:
        with _making(broker, seconds) as crowd:
            _, _, taken = crowd.finish()
    finally:
        broker.close()
    p99_ms = {kind: 1000 * percentile(took_s for _, took_s in pairs) for kind, pairs in taken.items()}
    return [
        within("lease_p99_ms", p99_ms["lease"], "ms", "<=", 5),
        plain("put_p99_ms", p99_ms["put"], "ms"),
        plain("heartbeat_p99_ms", p99_ms["beat"], "ms"),
    ]


def outage_rows(folder: Path, seconds: float) -> list[Row]:
    """The same workers, after the broker was killed and away: what a lease waits that is asked for three seconds after its return."""
    broker = BrokerProcess(folder / "outage").train()
    try:
        with _making(broker, 2 * seconds + AFTER_S + SETTLED_S) as crowd:
            broker.kill()
            time.sleep(seconds)
            broker.start()
            back = time.monotonic()
            _, _, taken = crowd.finish()
    finally:
        broker.close()
    settled = [took_s for at, took_s in taken["lease"] if at > back + SETTLED_S]
    assert len(settled) > WORKERS * AFTER_S / 2, f"only {len(settled)} leases after the outage"
    return [within(f"outage_{seconds:.0f}s_lease_p99_ms", 1000 * percentile(settled), "ms", "<=", 50)]


def _making(broker: BrokerProcess, seconds: float) -> Crowd:
    return Crowd(broker, 1, workers=WORKERS, sockets=WORKERS, beat_s=1.0, lease_s=1.0, wait_s=10.0, seconds=seconds)

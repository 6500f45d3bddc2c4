"""A broker that is away for a while: how soon it serves as before once it is back, though all that waited for it speak at once.

`bin/chaos --outage 60` runs this.
"""

import statistics
import time
from pathlib import Path

import msgspec
from live_broker import LiveBroker
from scripted import beat, begin, lease

from slimebus.bus.messages import GiveBack
from slimebus.bus.transport.client import Client

CLIENTS, HEARTBEAT_S = 64, 0.3
SETTLE_S, MEASURED_S = 3.0, 5.0
"""From the broker's first answer on: what is not measured, and what is."""


class Outage(msgspec.Struct, kw_only=True):
    """Seconds until the first answer after the start of the broker, and quantiles of how long a lease took before and after."""

    away_s: float
    back_s: float
    before_p99_s: float
    after_p99_s: float
    num_leases: int


def outage(folder: Path, away_s: float) -> Outage:
    """Clients with heartbeats, one of which leases a group and gives it back, again and again; meanwhile kill -9 and a new start."""
    folder.mkdir(parents=True, exist_ok=True)
    rollout = {"num_rollout": 1000, "rollout_batch_size": 4, "n_samples_per_prompt": 1}
    with LiveBroker(folder, broker={"heartbeat_s": HEARTBEAT_S, "max_attempts": 1_000_000, "lease_s": 600}, rollout=rollout) as live:
        begin(beat(live.client("t", "trainer"), HEARTBEAT_S))
        for i in range(CLIENTS):
            beat(live.client(f"w{i}", "rollout"), HEARTBEAT_S, state="serving", lineage="L", serving=0)
        before = _leases(live.clients[-1], MEASURED_S)
        live.kill()
        time.sleep(away_s)
        started = time.monotonic()
        live.start()
        live.status()
        back_s = time.monotonic() - started
        time.sleep(SETTLE_S)
        after = _leases(live.clients[-1], MEASURED_S)
    p99 = [statistics.quantiles(found, n=100)[-1] for found in (before, after)]
    return Outage(away_s=away_s, back_s=round(back_s, 3), before_p99_s=p99[0], after_p99_s=p99[1], num_leases=len(after))


def _leases(worker: Client, seconds: float) -> list[float]:
    """How long each lease took that this worker asked for in so many seconds."""
    took, until = [], time.monotonic() + seconds
    while time.monotonic() < until:
        asked = time.monotonic()
        (group,) = lease(worker)
        took.append(time.monotonic() - asked)
        worker.call(GiveBack(group=group.group, lease=group.lease, outcome="requeue", reason="measured"))
    return took

"""A process that waits uses less than 2% of a core."""

import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from live_run import Process, Run, clients, cpu_share
from waiting import wait_until

from slimebus.view.report import page_url

pytestmark = pytest.mark.integration

LOOK_S = 5.0
MOST = 0.02


def assert_idle(processes: list[Process], doing: str) -> None:
    """Over LOOK_S seconds none of them, nor anything below them, uses more than its share. The first second is theirs to settle."""
    time.sleep(1.0)
    family = [p for process in processes for p in process.family() if p.status() != psutil.STATUS_STOPPED]
    with cpu_share(family) as share:
        time.sleep(LOOK_S)
        used = {" ".join(p.cmdline()[1:5]): share()[p.pid] for p in family}
    assert all(value < MOST for value in used.values()), f"{doing}: {used}"


def test_processes_that_wait_use_next_to_nothing(tmp_path: Path, task: Path) -> None:
    with Run(tmp_path, task, broker__max_staleness=1, broker__http="127.0.0.1:0") as run:
        worker, trainer = run.start("rollout", name="w1"), run.start("trainer")
        time.sleep(4)
        assert_idle([worker, trainer], "waiting for a broker")

        worker.send(signal.SIGSTOP)
        broker = run.start("broker")
        url = wait_until("page", lambda: page_url(run.run_dir))
        urllib.request.urlopen(url.replace("/?", "/config?"), timeout=60).close()  # it is up: that takes a moment of CPU
        run.wait_for("a trainer that waits for a batch", lambda s: any(p["kind"] == "batch" for p in s["parked"]))
        assert_idle([broker, trainer], "waiting for a batch; broker without workers")

        worker.send(signal.SIGCONT)
        run.wait_for("a worker with weights", lambda s: any(c["version"] >= 0 for c in clients(s, "rollout")))
        trainer.send(signal.SIGSTOP)
        run.wait_for("a worker without capacity", lambda s: any(p["kind"] == "lease" for p in s["parked"]) and not s["groups"]["leased"])
        assert_idle([broker, worker], "waiting for capacity")

        trainer.send(signal.SIGCONT)
        run.complete(6)

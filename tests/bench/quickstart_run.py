"""Short real runs of the quick start for `bin/bench seeing`: what they did once warm, and how much of the machine others used meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import psutil
from slimebus_command import ENVIRONMENT, ROOT

from slimebus.bus.errors import SlimebusError
from slimebus.view import report

sys.path.insert(0, str(ROOT / "configs" / "quickstart"))

WARM_SHARE = 0.1
"""The first steps are left out, as in a simulation."""
FOREIGN, LOOK_S = 0.2, 3.0
"""Cores that others may use, over so many seconds; a run beside more is ended and made again once the machine is quiet."""
QUIET_S, TRIES = 1800.0, 30
POLL_S, SCRAPE_S = 0.05, 5.0


Times = tuple[float, float, float]


class Measured(NamedTuple):
    """A run once warm. cpu_s: of all of its processes, a step. foreign: cores that others used meanwhile."""

    run_dir: Path
    steps_per_s: float
    lag_mean: float
    cpu_s: float
    foreign: float


def prepared(folder: Path) -> Path:
    """The data and the warmed-up model of the quick start under this folder, made where it has none; the model."""
    import quickstart

    quickstart.prepare(folder, seed=0, resume=True)
    return quickstart.warm_up(folder, 0, None)


class Disturbed(Exception):
    """Something else used the machine."""


def run(folder: Path, name: str, steps: int, changes: dict[str, Any], **how: Any) -> Measured:
    """A run of the quick start with these changes as FOLDER/NAME-N, the first that nothing disturbed. how: see `_run`."""
    prepared(folder)
    for number in range(TRIES):
        wait_for_quiet()
        with suppress(Disturbed):
            one = _run(folder, f"{name}-{number}", steps, changes, **how)
            said = f"{one.steps_per_s:.3f} steps/s, lag {one.lag_mean:.2f}, {one.cpu_s:.3f} CPU s a step, others {one.foreign:.2f} cores"
            print(f"{one.run_dir.name}: {said}", file=sys.stderr, flush=True)
            return one
    raise SlimebusError(f"{name}: disturbed {TRIES} times; measure on an otherwise idle machine")


def wait_for_quiet() -> None:
    """Until others leave the machine alone. Raises SlimebusError when they do not."""
    deadline = time.monotonic() + QUIET_S
    while time.monotonic() < deadline:
        before = _machine_s()
        time.sleep(LOOK_S)
        if _machine_s() - before < FOREIGN * LOOK_S:
            return
    raise SlimebusError(f"others used the machine for {QUIET_S:.0f} s; measure on an otherwise idle one")


def _run(folder: Path, name: str, steps: int, changes: dict[str, Any], *, workers: int = 1, is_seen: bool = True) -> Measured:
    """is_seen: with spans and all that `changes` leave on, somebody who looks at the page, and a scraper of its metrics."""
    import quickstart

    run_dir, warm = folder / name, folder / "warm-up" / "hf"
    of_run = {"seed": 0, "model.hf_checkpoint": warm, "rollout.num_rollout": steps, "trainer.save_interval": 0, "trainer.save_hf": ""}
    file = quickstart.write_run("run.yaml", run_dir, folder, {**of_run, **changes})
    environment = dict(ENVIRONMENT)
    if not is_seen:
        environment["PYTHONPATH"] = os.pathsep.join([str(_unseen(folder)), str(ROOT)])
    words = [sys.executable, "-P", "-m", "slimebus", "up", str(file), "--workers", str(workers)]
    with (folder / f"{name}.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log, env=environment) as up:
        with looked_at(run_dir) if is_seen else nullcontext():
            try:
                first = _when(up, run_dir, int(WARM_SHARE * steps))
                last = _when(up, run_dir, steps)
            except Disturbed:
                up.send_signal(signal.SIGINT)
                up.wait()
                raise
        if up.wait():
            raise SlimebusError(f"slimebus up ended with code {up.returncode}; its log: {folder / name}.log")
    own, machine, seconds = _between(first, last)
    warm_steps = steps - int(WARM_SHARE * steps)
    rows = report.read_report(run_dir).steps
    elapsed_s = rows[-1]["elapsed_s"] - rows[-1 - warm_steps]["elapsed_s"]
    lag = fmean(row["lag_mean"] for row in rows[-warm_steps:])
    return Measured(run_dir, warm_steps / elapsed_s, lag, own / warm_steps, max(0.0, machine - own) / seconds)


def _unseen(folder: Path) -> Path:
    """A folder that makes processes write no spans when it is on the path; no option turns them off."""
    place = folder / "unseen"
    place.mkdir(exist_ok=True)
    text = "import slimebus.telemetry.spans as s\nmake = s.Spans.__init__\ns.Spans.__init__ = lambda self, *given, **how: make(self)\n"
    (place / "sitecustomize.py").write_text(text)
    return place


def _when(up: "subprocess.Popen[bytes]", run_dir: Path, steps: int) -> Times:
    """Once so many steps are on record. Raises Disturbed after the first of them when something else uses the machine."""
    file, before = run_dir / "metrics" / "trainer.jsonl", _times(up.pid)
    while not (file.is_file() and file.read_bytes().count(b"\n") >= steps):
        if up.poll() is not None:
            raise SlimebusError(f"slimebus up ended with code {up.returncode} before step {steps} of {run_dir}")
        time.sleep(POLL_S)
        if time.monotonic() - before[2] > LOOK_S:
            own, machine, seconds = _between(before, now := _times(up.pid))
            before = now
            if machine - own > 2 * FOREIGN * seconds and file.is_file():
                raise Disturbed
    return _times(up.pid)


def _times(pid: int) -> Times:
    """CPU seconds of a process and all below it so far, of the machine, and the time."""
    return cpu_s(pid), _machine_s(), time.monotonic()


def _between(first: Times, last: Times) -> Times:
    return last[0] - first[0], last[1] - first[1], last[2] - first[2]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it so far, those that have ended included."""
    seconds, me = 0.0, psutil.Process(pid)
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def _machine_s() -> float:
    """CPU seconds in which any core of the machine was busy, those stolen by its host included."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


@contextmanager
def looked_at(run_dir: Path) -> Iterator[None]:
    """Somebody has the page of the run open, and Prometheus reads its metrics."""
    ended = threading.Event()
    threads = [threading.Thread(target=work, args=(run_dir / "page.url", ended), daemon=True) for work in (_look, _scrape)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def _look(url_file: Path, ended: threading.Event) -> None:
    while not ended.wait(POLL_S):
        with suppress(OSError), urllib.request.urlopen(url_file.read_text().replace("/?", "/events?"), timeout=30) as events:
            while not ended.is_set() and events.readline():
                pass


def _scrape(url_file: Path, ended: threading.Event) -> None:
    while not ended.wait(SCRAPE_S):
        with suppress(OSError), urllib.request.urlopen(url_file.read_text().replace("/?", "/metrics?"), timeout=30) as answer:
            answer.read()

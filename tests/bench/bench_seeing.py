"""What seeing a run costs it, how fast its page and the simulator are, and how true the simulator is: `bin/bench seeing`.

steps/s of two runs on a shared machine differ by several percent by themselves, so the two costs are judged by CPU time: with all cores
in use, as in the quick start, steps/s fall by no more than CPU seconds a step rise. On and off take turns; the median of the pairs counts.
"""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import quickstart_run
import simulate_accuracy
from bench_process import BrokerProcess, Crowd
from bench_row import Row, absent, row, within
from browser import Browser, find_chromium
from waiting import wait_until

from broker.simulate.simulated_run import simulate
from broker.simulate.workload import Workload
from slimebus.view.report import page_url

PAIRS, COST_STEPS = 2, 50
PREDICTED = (0, 1, 4, 6, 9)
"""Of simulate_accuracy.CONFIGURATIONS: the others would take six minutes more."""
UNSEEN = {"broker.http": "", "trainer.tensorboard": False}
STILL = {"optimizer.lr": 0.0, "optimizer.min_lr": 0.0, "rollout.rollout_temperature": 1.0}
"""A model that does not learn gives every step the same work."""
WORKERS, PAGE_STEPS, LOADS, UPDATES = 1_000, 10_000, 5, 10
MESSAGES = 60_000


def rows(quick: bool) -> list[Row]:
    """All measurements; quick: shorter runs, fewer of them."""
    with tempfile.TemporaryDirectory(prefix="slimebus-bench-") as scratch:
        folder = Path(scratch)
        quickstart_run.prepared(folder)
        found = predicted(folder, quick)
        return [
            *cost_rows(folder, 1 if quick else PAIRS, 30 if quick else COST_STEPS),
            *broker_rows(folder, 2 if quick else 4, MESSAGES // (4 if quick else 1)),
            *size_rows(100 if quick else 1_000),
            *found,
            *page_rows(folder),
        ]


def paired(pairs: int, on: Callable[[], Any], off: Callable[[], Any]) -> Iterator[tuple[Any, Any]]:
    """Values of both; which comes first alternates."""
    for pair in range(pairs):
        first, second = (on, off) if pair % 2 else (off, on)
        one, other = first(), second()
        yield (one, other) if pair % 2 else (other, one)


def cost(name: str, unit: str, values: list[tuple[float, float]], goal: str) -> Row:
    """By how much the first of each pair is above the second, by the median of the pairs."""
    on, off = (statistics.median(column) for column in zip(*values, strict=True))
    return row(name, on, unit, off, goal, ratio=statistics.median(one / other - 1 for one, other in values))


# --- what it costs ---


def cost_rows(folder: Path, pairs: int, steps: int) -> list[Row]:
    """The quick start with page, somebody who looks at it, a scraper, TensorBoard and spans against none of them."""
    names = (f"cost{i}" for i in range(1_000))
    made = list(
        paired(
            pairs,
            lambda: quickstart_run.run(folder, next(names), steps, dict(STILL)),
            lambda: quickstart_run.run(folder, next(names), steps, STILL | UNSEEN, is_seen=False),
        )
    )
    return [
        cost("seeing_cost", "CPU s a step", [(on.cpu_s, off.cpu_s) for on, off in made], "<= 0.02"),
        cost("seeing_cost_steps", "s a step", [(1 / on.steps_per_s, 1 / off.steps_per_s) for on, off in made], ""),
    ]


def broker_rows(folder: Path, pairs: int, messages: int) -> list[Row]:
    """CPU time of the broker for a lease or a heartbeat, with its page open beside it against no page."""
    broker = BrokerProcess(folder / "seen", "memory", core=0).train()

    def measure() -> float:
        before = broker.cpu_s()
        done = broker.load(kind="control", workers=16, window=16, messages=messages, core=1)
        return 1e6 * (broker.cpu_s() - before) / float(done["messages"])

    def measure_seen() -> float:
        with _page(broker):
            return measure()

    try:
        measure()
        values = list(paired(pairs, measure_seen, measure))
    finally:
        broker.close()
    return [cost("seeing_broker_cost", "CPU us a message", values, "<= 0.01")]


@contextlib.contextmanager
def _page(broker: BrokerProcess) -> Iterator[None]:
    """A page of this broker that somebody looks at and Prometheus reads."""
    file = broker.folder / "page.log"
    page = broker.start_beside("-m", "slimebus", "view", str(broker.run_dir), "--broker", broker.address, log=file)
    try:
        wait_until("page", lambda: file.exists() and "page: " in file.read_text())
        (broker.run_dir / "page.url").write_text(file.read_text().split("page: ")[-1].split()[0])
        with quickstart_run.looked_at(broker.run_dir):
            yield
    finally:
        page.kill()


# --- the simulator ---


def size_rows(steps: int) -> list[Row]:
    """10,000 workers and 1,000 steps of the defaults."""
    began = time.process_time()
    simulate(Workload(workers=10_000, steps=steps))
    return [within("simulate_10k_s", (time.process_time() - began) * 1_000 / steps, "s for 1,000 steps", "<=", 60)]


def predicted(folder: Path, quick: bool) -> list[Row]:
    """The simulator against real runs."""
    steps, numbers = (20, PREDICTED[:3]) if quick else (simulate_accuracy.STEPS, PREDICTED)
    return simulate_accuracy.rows(simulate_accuracy.predict(folder, steps, [simulate_accuracy.CONFIGURATIONS[i] for i in numbers]))


# --- the page ---


def page_rows(folder: Path) -> list[Row]:
    """The page of a live broker with 1,000 workers and 10,000 steps on record, in Chromium."""
    if find_chromium() is None:
        return [absent(name, "no Chromium here") for name in ("page_first_paint_ms", "page_update_ms")]
    metrics = folder / "shown" / "run" / "metrics"
    metrics.mkdir(parents=True)
    (metrics / "broker.jsonl").write_text("".join(json.dumps(_step(step)) + "\n" for step in range(PAGE_STEPS)))
    broker = BrokerProcess(folder / "shown", "memory", broker={"http": "127.0.0.1:0"}).train()
    try:
        with Crowd(broker, 1, workers=WORKERS, sockets=10, beat_s=2.0, lease_s=11.0, wait_s=10.0, seconds=600.0):
            tab = Browser(folder / "chromium")
            try:
                return _page_rows(tab, page_url(broker.run_dir))
            finally:
                tab.close()
    finally:
        broker.close()


def _step(step: int) -> dict[str, Any]:
    metrics = {"reward": step % 97 / 97, "loss": 0.1, "wait_s": 0.1, "train_s": 0.6, "publish_s": 0.01, "save_s": 0.0}
    counted = {"version": step, "lag_mean": step % 3, "lag_max": 2, "tokens": 9e3, "rollout_tokens": 9e3 * step, "wasted_tokens": step}
    return {"time": 1.7e9 + step, "step": step, **counted, "ready": 3, "leased": 32, "queued": 0, "metrics": metrics}


def _page_rows(tab: Any, url: str) -> list[Row]:
    paints = []
    for _ in range(LOADS):
        tab.goto("about:blank")
        tab.goto(url)
        tab.wait_for("performance.getEntriesByName('first-contentful-paint').length")
        paints.append(tab.js("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    tab.wait_for(f"state.status && state.status.workers.length > {WORKERS - 1} && state.records && state.records.step.length", 120.0)
    tab.call("Performance.enable", timeDomain="threadTicks")
    tab.js("window.updates = []")
    before = _main_thread_s(tab)
    tab.wait_for(f"window.updates.length >= {UPDATES}", 300.0)
    updates, spent_s = tab.js("window.updates.length"), _main_thread_s(tab) - before
    return [
        within("page_first_paint_ms", statistics.median(paints), "ms", "<=", 1_000),
        within("page_update_ms", 1_000 * spent_s / updates, "ms of the main thread", "<=", 50),
    ]


def _main_thread_s(tab: Any) -> float:
    """CPU seconds of the page's main thread: scripts, layout and painting."""
    return float(next(m["value"] for m in tab.call("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration"))

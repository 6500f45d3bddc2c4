"""A run of real processes under kill -9 and SIGSTOP, each restarted as an operator would; then everything is counted.

`bin/chaos --minutes N` runs this; docs/proofs.md says what it promises.
"""

import contextlib
import heapq
import itertools
import json
import math
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import psutil
import yaml

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "fixtures"), str(ROOT)]

from chaos_faults import DECK, Deck, Fault  # noqa: E402
from chaos_ledger import Ledger, balance  # noqa: E402
from leaving import ORDERS, leave  # noqa: E402
from live_run import Process, Run  # noqa: E402
from load_attack import LoadAttack, Report  # noqa: E402
from outage import outage  # noqa: E402

from broker.main import VALIDATE  # noqa: E402
from broker.source import FileRows, FileSource  # noqa: E402
from broker.state.groups import Group  # noqa: E402
from broker.state.records import Meta, StepRecord  # noqa: E402
from broker.store import open_store  # noqa: E402

BOUND = 2
BATCH_SIZE = 4
LEASE_S = 3.0
START_S = 120.0
"""Most seconds for the first trained step, and for a restarted trainer."""
CALM_S = 90.0
"""Once faults end, a step must be trained within so many seconds."""
CALM_STEPS = 3
ZOMBIE_S = 60.0
"""A process that was replaced ends within so many seconds of being continued and of the start of its successor."""
RESTART_S = 1.0

HOOKS = '''
"""Sampling takes a while, so that faults find groups in the workers' hands; some prompts always fail, some are filtered out."""
import asyncio
import random


async def generate(session):
    if int(session.task.label) % 41 == 0:
        raise RuntimeError("this prompt always fails")
    await asyncio.sleep(random.uniform(0.02, 0.5))
    await session.generate()


def keep(samples):
    return sum(int(s.tokens.sum()) for s in samples) % 23 != 0
'''


class Keeper:
    """One process that is restarted whenever it has ended. `why`: the fault that ended it last; empty: it ended by itself."""

    def __init__(self, name: str, start: Callable[..., Process]) -> None:
        self.name, self._start, self._flags = name, start, list[str]()
        self.process: Process | None = None
        self.restart_at = 0.0
        self.restart_after_s = RESTART_S
        self.why = ""
        self.started_at = 0.0
        self.ends: Counter[str] = Counter()

    def tend(self, now: float) -> None:
        """Start it if it is time to."""
        if self.process is None:
            if now >= self.restart_at:
                self.process, self.why, self.started_at = self._start(*self._flags), "", now
                self._flags = []
            return
        code = self.process.popen.poll()
        if code is not None:
            self.ends[self.why or f"ended by itself with code {code}"] += 1
            self.process, self.restart_at, self.restart_after_s = None, now + self.restart_after_s, RESTART_S

    def kill(self, restart_after_s: float) -> None:
        """kill -9."""
        assert self.process is not None
        self.why, self.restart_after_s = "killed", restart_after_s
        self.process.popen.kill()

    def let_go(self) -> Process:
        """Give up the present process without ending it; another takes its place at once, also should it wake up before that."""
        assert self.process is not None
        self._flags = ["--take-over"]
        process, self.process, self.restart_at = self.process, None, 0.0
        self.ends["replaced"] += 1
        return process

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.popen.poll() is None


class Struck(msgspec.Struct, kw_only=True):
    """A fault that was carried out: at_s seconds after the first trained step; wall: seconds since the epoch."""

    at_s: float
    wall: float
    fault: Fault
    target: str
    detail: str = ""


class Stall(msgspec.Struct, kw_only=True):
    """The time between two trained steps, and the faults that fell into it or just before."""

    seconds: float
    after_step: int
    at_s: float
    faults: list[str]


class Outcome(msgspec.Struct, kw_only=True):
    """What came of a chaos run; `problems` empty: every promise was kept."""

    seed: int
    seconds: float
    faults: dict[str, int]
    ledger: Ledger
    drawn: int
    moves: dict[str, int]
    restarts: dict[str, dict[str, int]]
    longest_stall: Stall
    median_step_s: float
    rudeness: dict[str, int]
    passed_on_bytes: float
    """Of weights, by workers that were alive at the end of a version; their metrics begin anew with each process."""
    problems: list[str]


class Chaos:
    """The run, its keepers and its agenda."""

    def __init__(self, folder: Path, *, seed: int, workers: int, mean_gap_s: float, durability: str) -> None:
        self.seed = seed
        folder.mkdir(parents=True, exist_ok=True)
        task = make_task(folder / "task")
        (folder / "chaos_hooks.py").write_text(HOOKS)
        self.run = Run(folder, task, **changes(task, durability))
        self.deck = Deck(seed, mean_gap_s=mean_gap_s, long_stop_s=1.3 * LEASE_S)
        self.keepers = {"broker": self._keeper("broker", "broker"), "trainer": self._keeper("trainer", "trainer")}
        self.workers = [f"w{i + 1}" for i in range(workers)]
        for name in self.workers:  # each as on a host of its own: they pull weights from each other
            (folder / "shm" / name).mkdir(parents=True, exist_ok=True)
        self.keepers |= {name: self._keeper(name, "rollout") for name in self.workers}
        rude = [sys.executable, str(Path(__file__).with_name("rude_client.py")), self.run.address, str(seed)]
        self.keepers["rude client"] = Keeper("rude client", lambda: self.run.command("rude", rude))
        self.struck: list[Struck] = []
        self.problems: list[str] = []
        self.zombies: list[tuple[str, Process, float]] = []
        self.stopped: dict[int, psutil.Process] = {}
        self.rudeness: dict[str, int] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._steps_at_trainer_start = 0
        self._chance = random.Random(seed ^ 0x5EED)
        self.started = 0.0

    def _keeper(self, name: str, role: str) -> Keeper:
        own = ["--weights-shm", str(self.run.folder / "shm" / name)] if role == "rollout" else []
        return Keeper(name, lambda *flags: self.run.start(role, *own, *flags, name=name))

    # --- the course of it ---

    def carry_out(self, seconds: float, *, until_all_kinds_s: float = 0.0, min_steps: int = 0) -> Outcome:
        """Faults for so many seconds, and until each kind has struck but no longer than until_all_kinds_s; then calm, then the count.

        min_steps: the calm also lasts until the surviving timeline has so many steps; a problem if that takes longer than CALM_S.
        """
        with self.run:
            try:
                self._until(lambda: self.num_rows() > 0, START_S, "no step was trained at the start")
                self.started = time.monotonic()
                self._plan(self._strike, self.deck.draw())
                self._until(lambda: False, seconds, "")
                self._until(self.has_struck_all, until_all_kinds_s - seconds, "")
                self._agenda = sorted(entry for entry in self._agenda if entry[2].__name__ != "strike")
                calm = self.num_rows()
                goal, problem = calm + CALM_STEPS, "no progress once the faults had ended"
                self._until(lambda: self.num_rows() >= goal and self.next_step() >= min_steps, CALM_S, problem)
                self._until(lambda: not self.zombies and not self._agenda, 2 * ZOMBIE_S, "")
            finally:
                for process in self.stopped.values():
                    with contextlib.suppress(psutil.Error):
                        process.resume()
            elapsed = time.monotonic() - self.started
            self._end_in_good_order()
        return self._outcome(elapsed)

    def _until(self, is_done: Callable[[], bool], timeout_s: float, problem: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            now = time.monotonic()
            if now > deadline:
                if problem:
                    self.problems.append(f"{problem}, within {timeout_s:.0f} s; status: {json.dumps(self.run.status().get('waiting'))}")
                return
            while self._agenda and self._agenda[0][0] <= now:
                heapq.heappop(self._agenda)[2]()
            for keeper in self.keepers.values():
                keeper.tend(now)
            self._look_after_zombies(now)
            time.sleep(0.05)

    def num_rows(self) -> int:
        """Steps that a trainer has finished so far, those of abandoned timelines too."""
        file = self.run.run_dir / "metrics" / "trainer.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def next_step(self) -> int:
        """The step after the newest finished one."""
        return max((row["step"] + 1 for row in self.run.rows("trainer")[-1:]), default=0)

    def has_struck_all(self) -> bool:
        """True once every kind of fault has hit every kind of target that it can hit."""
        return {(s.fault.kind, s.fault.target) for s in self.struck} == set(DECK)

    def _look_after_zombies(self, now: float) -> None:
        for name, process, deadline in list(self.zombies):
            if process.popen.poll() is not None:
                self.zombies.remove((name, process, deadline))
            elif now > deadline and self._has_been_up(name, now):
                self.zombies.remove((name, process, deadline))
                self.problems.append(self._about_zombie(name, process))
                process.popen.kill()

    def _has_been_up(self, name: str, now: float) -> bool:
        """True once the successor has run long enough to have joined: until then the older process rightly keeps its place."""
        keeper = self.keepers[name]
        return keeper.is_up and now - keeper.started_at > ZOMBIE_S

    def _about_zombie(self, name: str, process: Process) -> str:
        present = self.keepers[name].process
        known = [client for client in self.run.status().get("clients", []) if client["name"] == name]
        return (
            f"{name}, which was replaced, still runs {ZOMBIE_S:.0f} s after it was continued; the broker knows {known}\n"
            f"{process.tail()}\n{present.tail() if present else 'its successor is gone'}"
        )

    def _end_in_good_order(self) -> None:
        for name in ("rude client", "trainer", *self.workers, "broker"):
            process = self.keepers[name].process
            if process is None:
                continue
            process.send(signal.SIGTERM)
            try:
                process.popen.wait(20)
            except subprocess.TimeoutExpired:
                self.problems.append(f"{name} still runs 20 s after SIGTERM\n{process.tail()}")
                process.kill()
            if name == "rude client":
                self._note_rudeness(process)
        try:
            self.run.assert_none_alive(within_s=5.0)
        except AssertionError as left:
            self.problems.append(str(left))

    def _note_rudeness(self, process: Process) -> None:
        """What the rude client was answered; it must have been heard, and nothing wrong taken."""
        told = [json.loads(line) for line in process.text().splitlines() if line.startswith("{")]
        if not told or told[-1]["accepted"]:
            self.problems.append(f"the rude client: {told[-1]['accepted'] if told else 'said nothing'}\n{process.tail()}")
        else:
            self.rudeness = told[-1]["answers"]

    # --- faults ---

    def _plan(self, act: Callable[[Fault], None], fault: Fault) -> None:
        def strike() -> None:
            act(fault)

        heapq.heappush(self._agenda, (time.monotonic() + fault.gap_s, next(self._order), strike))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), act))

    def _strike(self, fault: Fault) -> None:
        self._plan(self._strike, self.deck.draw())
        name = self.workers[fault.which % len(self.workers)] if fault.target in ("worker", "engine") else fault.target
        keeper = self.keepers[name]
        is_away = not keeper.is_up or (keeper.process is not None and keeper.process.pid in self.stopped)
        if is_away or (name == "trainer" and fault.kind != "stop" and not self._may_lose_trainer()):
            self.deck.put_back(fault)
            return
        label = f"{fault.kind} {name}" if fault.target != "engine" else f"{fault.kind} engine of {name}"
        if fault.target == "engine":
            engine = self._engine_of(keeper)
            if engine is None:
                self.deck.put_back(fault)
                return
            self._hit_engine(fault, engine)
        elif fault.kind == "kill":
            keeper.kill(fault.pause_s)
        elif fault.kind == "stop":
            assert keeper.process is not None
            self._freeze(psutil.Process(keeper.process.pid), fault.pause_s)
        else:
            self._replace(keeper, fault)
        detail = f"back after {fault.pause_s:.1f} s" if fault.kind != "replace" else f"older one continued after {fault.pause_s + 2:.1f} s"
        self.struck.append(Struck(at_s=time.monotonic() - self.started, wall=time.time(), fault=fault, target=label, detail=detail))

    def _may_lose_trainer(self) -> bool:
        """Usually only a trainer that has trained something since it started; now and then one that is still starting."""
        steps = self.num_rows()
        if steps <= self._steps_at_trainer_start + 4 and self._chance.random() < 0.85:
            return False
        self._steps_at_trainer_start = steps
        return True

    def _engine_of(self, keeper: Keeper) -> psutil.Process | None:
        assert keeper.process is not None
        with contextlib.suppress(psutil.Error, ValueError):
            return keeper.process.engine()
        return None

    def _hit_engine(self, fault: Fault, engine: psutil.Process) -> None:
        with contextlib.suppress(psutil.Error):
            if fault.kind == "kill":
                engine.kill()
            else:
                self._freeze(engine, fault.pause_s)

    def _freeze(self, process: psutil.Process, seconds: float) -> None:
        process.suspend()
        self.stopped[process.pid] = process
        self._after(seconds, lambda: self._thaw(process))

    def _thaw(self, process: psutil.Process) -> None:
        self.stopped.pop(process.pid, None)
        with contextlib.suppress(psutil.Error):
            process.resume()

    def _replace(self, keeper: Keeper, fault: Fault) -> None:
        assert keeper.process is not None
        stopped = psutil.Process(keeper.process.pid)
        stopped.suspend()
        self.stopped[stopped.pid] = stopped
        zombie = keeper.let_go()
        zombie.expected.update((0, 1))
        wait_s = fault.pause_s + 2.0

        def wake() -> None:
            self._thaw(stopped)
            self.zombies.append((keeper.name, zombie, time.monotonic() + ZOMBIE_S))

        self._after(wait_s, wake)

    # --- the count ---

    def _outcome(self, elapsed: float) -> Outcome:
        ledger, times = count(self.run), [row["time"] for row in self.run.rows("trainer")]
        final = self.run.final_status() if (self.run.run_dir / "status.json").is_file() else {"source": {"position": -1}, "moves": {}}
        gaps = sorted(b - a for a, b in itertools.pairwise(times))
        return Outcome(
            seed=self.seed,
            seconds=round(elapsed, 1),
            faults=dict(Counter(f"{s.fault.kind} {s.fault.target}" for s in self.struck)),
            ledger=ledger,
            drawn=final["source"]["position"],
            moves=final["moves"],
            restarts={name: dict(keeper.ends) for name, keeper in self.keepers.items()},
            longest_stall=self._longest_stall(),
            median_step_s=round(gaps[len(gaps) // 2], 3) if gaps else math.inf,
            rudeness=self.rudeness,
            passed_on_bytes=sum(
                max((row["passed_on_bytes"] for row in self.run.rows(f"rollout-{name}")), default=0.0) for name in self.workers
            ),
            problems=[*self.problems, *ledger.problems],
        )

    def _longest_stall(self) -> Stall:
        rows = self.run.rows("trainer")
        zero = rows[0]["time"] if rows else 0.0
        stalls = [
            Stall(seconds=round(b["time"] - a["time"], 2), after_step=a["step"], at_s=round(a["time"] - zero, 1), faults=self._near(a, b))
            for a, b in itertools.pairwise(rows)
        ]
        return max(stalls, key=lambda s: s.seconds, default=Stall(seconds=math.inf, after_step=-1, at_s=0.0, faults=[]))

    def _near(self, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
        return [s.target for s in self.struck if before["time"] - 1.0 <= s.wall <= after["time"]]


def count(run: Run) -> Ledger:
    """The ledger of a run after its processes have ended, from its files alone."""
    store = open_store("os", run.run_dir / "broker")
    try:
        meta = msgspec.msgpack.decode(dict(store.scan("meta"))["meta"], type=Meta)
        groups = [msgspec.msgpack.decode(value, type=Group) for _, value in store.scan("groups")]
        ended = [msgspec.msgpack.decode(value, type=Group) for _, value in store.scan("ended")]
        steps = [msgspec.msgpack.decode(value, type=StepRecord) for _, value in store.scan("steps")]
    finally:
        store.close()
    source = FileSource(FileRows(yaml.safe_load(run.file.read_text())["data"]["prompt_data"]))

    def position_of(name: str) -> int | None:
        found = source.find(name)
        return None if found is None else found.position

    return balance(
        run.rows("batches"),
        next_step=meta.next_step,
        in_play={g.id: g.phase for g in groups if g.phase != "committed"},
        ended={g.id: (g.phase, g.reason) for g in ended},
        broker_steps={s.step: s.groups for s in steps if s.is_committed},
        drawn=meta.cursor,
        position_of=position_of,
        bound=BOUND,
    )


def changes(task: Path, durability: str) -> dict[str, Any]:
    """What differs from the tiny run: frequent checkpoints, short leases, a run that does not end by itself."""
    return {
        "broker__lease_s": LEASE_S,
        "broker__durability": durability,
        "broker__max_staleness": BOUND,
        "broker__connect_timeout_s": START_S,
        "data__prompt_data": [f"{task}/rl.jsonl"],
        "rollout__num_rollout": 1_000_000,
        "rollout__rollout_batch_size": BATCH_SIZE,
        "rollout__custom_generate_function_path": "chaos_hooks.py:generate",
        "rollout__dynamic_sampling_filter_path": "chaos_hooks.py:keep",
        "trainer__save_interval": 5,
        "weights__fanout_bind": "tcp://127.0.0.1:0",
    }


def make_task(folder: Path) -> Path:
    """The quick start's tiny model, tokenizer and prompts."""
    if not (folder / "model").is_dir():
        subprocess.run([sys.executable, str(ROOT / "configs/quickstart/make.py"), "--out", str(folder)], check=True, timeout=120)
    return folder


# --- for people ---


def table(outcome: Outcome, struck: list[Struck]) -> Iterator[str]:
    """The report, line by line."""
    yield f"{'at':>8}  {'fault':<28}"
    for one in struck:
        yield f"{one.at_s:7.1f}s  {one.target:<28} {one.detail}"
    o, ledger = outcome, outcome.ledger
    in_play, ended = ledger.in_play_by_phase(), ledger.ended_by_reason()
    yield ""
    yield f"seed {o.seed}: {len(struck)} faults in {o.seconds:.0f} s ({', '.join(f'{n} x {k}' for k, n in sorted(o.faults.items()))})"
    yield f"steps          {len(ledger.timeline)} trained in the surviving timeline, {o.median_step_s:g} s each (median)"
    yield f"batches        {ledger.abandoned_rows} more of {ledger.lineages - 1} abandoned timelines"
    yield f"prompts        {o.drawn} drawn: {len(ledger.trained)} trained, {len(ledger.in_play)} in play, {len(ledger.ended)} ended"
    yield f"  in play      {', '.join(f'{n} {phase}' for phase, n in sorted(in_play.items())) or 'none'}"
    for reason, number in sorted(ended.items()):
        yield f"  ended        {number:5d}  {reason}"
    yield f"staleness      bound {BOUND}; tokens trained at each: {ledger.lag_tokens}"
    for name, ends in o.restarts.items():
        yield f"{name:<14} {', '.join(f'{n} x {why}' for why, n in sorted(ends.items())) or 'never ended'}"
    yield f"rude client    {', '.join(f'{n} x {answer}' for answer, n in o.rudeness.items()) or 'not heard'}"
    stall = o.longest_stall
    yield f"longest stall  {stall.seconds:.1f} s after step {stall.after_step}: {', '.join(stall.faults) or 'no fault near'}"
    yield ""
    yield "every prompt is accounted for" if not o.problems else f"{len(o.problems)} PROBLEMS"
    yield from o.problems


def run_load_attack(folder: Path, strike: Callable[[LoadAttack], Report]) -> int:
    """Print what an attack did as one JSON object; the exit code."""
    with LoadAttack(folder) as attack:
        report = strike(attack)
    click.echo(msgspec.json.format(msgspec.json.encode(report)))
    return 0 if report.is_alive and not report.problems else 1


def run_leaving(folder: Path) -> int:
    """Print what each order came to; the exit code."""
    task, has_failed = make_task(folder / "task"), False
    for order, first in itertools.product(ORDERS, (signal.SIGTERM, signal.SIGKILL)):
        problems = leave(folder / f"{'-'.join(order)}-{first.name}", task, order, first)
        has_failed |= bool(problems)
        click.echo(f"{first.name} to the {order[0]}, then SIGTERM to {' and '.join(order[1:])}: {'FAILED' if problems else 'ok'}")
        click.echo("\n".join(problems), nl=bool(problems))
    return int(has_failed)


@click.command()
@click.option("--minutes", default=2.0, show_default=True, help="[minutes] Of faults; start, calm and count come on top.")
@click.option("--seed", type=int, help="[number] Decides every fault; default: a random one, printed.")
@click.option("--workers", default=3, show_default=True, type=click.IntRange(min=1), help="Rollout workers; hostile processes.")
@click.option("--mean-gap-s", default=3.0, show_default=True, help="[seconds] Mean time between two faults.")
@click.option("--durability", default="os", show_default=True, type=click.Choice(["fsync", "os"]), help="Of the broker.")
@click.option("--folder", type=click.Path(path_type=Path), help="[path] Keep everything here; default: a folder of its own under /tmp.")
@click.option("--hostile", type=click.IntRange(min=1000), help="[messages] Instead: send so many hostile ones to a live broker.")
@click.option("--floods", type=click.IntRange(min=1), help="[floods] Instead: so many floods of a live broker, --minutes altogether.")
@click.option(
    "--outage", "away_s", type=click.FloatRange(min=1), help="[seconds] Instead: measure leases after a broker was away for so long."
)
@click.option("--leaving", is_flag=True, help="Instead: end the processes of a run in every order, the first in good order and by kill -9.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def chaos(
    minutes: float,
    seed: int | None,
    workers: int,
    mean_gap_s: float,
    durability: str,
    folder: Path | None,
    hostile: int | None,
    floods: int | None,
    away_s: float | None,
    leaving: bool,
    as_json: bool,
) -> None:
    """Kill and stop the processes of a real run at random moments, restart them, and count what became of every prompt.

    Exit code 0: every prompt was trained exactly once in the timeline that survived, or is in play, dropped or dead with a reason,
    and nothing beyond the staleness bound was trained; 1: otherwise.
    """
    seed = secrets.randbits(31) if seed is None else seed
    folder = folder or Path(tempfile.mkdtemp(prefix=f"slimebus-chaos-{seed}-"))
    if hostile:
        sys.exit(run_load_attack(folder, lambda attack: attack.nonsense(hostile, peers=workers, seed=seed)))
    if floods:
        sys.exit(run_load_attack(folder, lambda attack: attack.flood(60 * minutes / floods, floods)))
    if away_s:
        click.echo(msgspec.json.format(msgspec.json.encode(outage(folder, away_s))))
        return
    if leaving:
        sys.exit(run_leaving(folder))
    click.echo(f"chaos: seed {seed}, {minutes:g} minutes, {workers} workers, in {folder}", err=True)
    one = Chaos(folder, seed=seed, workers=workers, mean_gap_s=mean_gap_s, durability=durability)
    outcome = one.carry_out(minutes * 60)
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(outcome, str_keys=True), "struck": msgspec.to_builtins(one.struck)}))
    else:
        click.echo("\n".join(table(outcome, one.struck)))
    sys.exit(1 if outcome.problems else 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[VALIDATE] = "1"
    chaos()

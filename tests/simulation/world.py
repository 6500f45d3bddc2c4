"""The real state machine among simulated workers, a trainer, a disk and a network, on a virtual clock.

Everything follows from the seed: the same seed replays to the same event. Faults happen until `scenario.calm_at`; what
must hold is in invariants.py, what goes wrong in faults.py.
"""

import random
from collections import Counter, deque
from typing import Any

from simulation import faults as fault_kinds
from simulation import scenario as scenarios
from simulation.account import Account
from simulation.actor import Actor, Broken, require
from simulation.broker_process import BrokerProcess
from simulation.clock import Timeline
from simulation.invariants import Invariants
from simulation.network import Network
from simulation.trainer import Checkpoint, Trainer
from simulation.worker import Worker

from broker.state.effects import Address
from broker.state.rules import Rules
from slimebus import messages as m

TRACED = 40
LONGEST_STEP_S = 150.0
"""Once faults are over, no step takes longer: four groups of the slowest worker, and the longest silence before it is noticed."""
LAST_EVENT = 200_000


class World:
    """One simulated run. `run()` returns when it has ended well, and raises Broken otherwise. `only`: one kind of fault alone."""

    def __init__(self, seed: int, *, faults: bool = True, only: str = "", is_verbose: bool = False) -> None:
        self.seed, self.is_verbose = seed, is_verbose
        self.random = random.Random(seed)
        self.scenario = scenarios.draw(self.random, faults=faults)
        self.timeline = Timeline()
        self.events = 0
        self.recent: deque[str] = deque(maxlen=TRACED)
        self.faults: Counter[str] = Counter()
        self.processes: dict[bytes, Actor] = {}
        self.handed_out: dict[tuple[str, int], list[str]] = {}
        self._skews: dict[str, float] = {}
        self._progress_at = 0.0
        self.bounds, self.batch_sizes = {self.rules.max_staleness}, {self.rules.batch_size}
        self.account = Account()
        self.invariants = Invariants(self)
        self.network = Network(self.timeline, self.random, lambda: self.is_calm, roughness=self.scenario.roughness)
        self.broker = BrokerProcess(self)
        self.broker.start()
        self.guests: list[Worker] = []
        self.trainer = Trainer(self, "t", [Checkpoint()])
        self.workers = [Worker(self, f"w{i}", plan) for i, plan in enumerate(self.scenario.workers)]
        if faults:
            fault_kinds.begin(self, only)

    @property
    def rules(self) -> Rules:
        """The rules that the run began with."""
        return self.scenario.rules

    @property
    def now(self) -> float:
        """The true time."""
        return self.timeline.now

    @property
    def is_calm(self) -> bool:
        """True once faults are over."""
        return self.now >= self.scenario.calm_at

    # --- running ---

    def run(self) -> None:
        """Let everything happen until the run has ended."""
        while not self._has_ended():
            self.step()
        self._check_end()

    def step(self) -> None:
        """One event: a turn of the broker or whatever happens next elsewhere."""
        self.events += 1
        wake_at = self.broker.wake_at()
        if wake_at <= self.timeline.next_at():
            self.timeline.now = max(self.now, wake_at)
            self.broker.turn()
        else:
            self.timeline.step()
        stalled_s = self.now - max(self._progress_at, self.scenario.calm_at)
        if self.broker.is_over and not self.trainer.is_done:  # someone still needs it: it is started again
            self.broker.start()
        if stalled_s > LONGEST_STEP_S or self.events > LAST_EVENT:
            raise Broken(f"no progress for {stalled_s:.0f} s: {self._picture()}")

    def progressed(self) -> None:
        """The trainer has trained a step, or finished."""
        self._progress_at = self.now

    def _has_ended(self) -> bool:
        """Who comes when the broker has ended finds nobody, and gives up."""
        if not (self.trainer.is_done and self.trainer.is_dead):
            return False
        return self.broker.is_over or (self._is_left_alone() and all(worker.is_dead for worker in [*self.workers, *self.guests]))

    def _is_left_alone(self) -> bool:
        """A broker started again after everyone had left waits for more."""
        machine = self.broker.machine
        return machine is not None and machine.state.meta.finishing and not machine.state.had_members

    def _picture(self) -> Any:
        machine = self.broker.machine
        return "the broker is down" if machine is None else machine.status(self.broker.awake.now)["waiting"]

    def _check_end(self) -> None:
        trained, rules = self.trainer.trained, self.rules
        if rules.num_steps is not None:
            require(sorted(trained) == list(range(rules.num_steps)), f"trained steps {sorted(trained)} of {rules.num_steps}")
        require(all(len(groups) in self.batch_sizes for groups in trained.values()), "a batch of another size")
        machine = self.broker.machine
        assert machine is not None
        self.invariants.deep(machine)
        require(not machine.state.groups.by_lease, "leases are held after everyone has left")
        if rules.num_steps is None:
            self._check_whole_source(trained)

    def _check_whole_source(self, trained: dict[int, tuple[str, ...]]) -> None:
        """The source has ended: each prompt is trained, or dropped or dead with a reason, or left over from the last batch."""
        names = {group for groups in trained.values() for group in groups}
        left = {name for name in self.broker.disk.tables["groups"] if not name.startswith("eval/")} - names
        ended = set(self.broker.disk.tables["ended"])
        every = {self.scenario.source.id_at(i) for i in range(self.scenario.source.total)}
        if not self.account.lost_suffix:
            require(len(left) < max(self.batch_sizes), f"{len(left)} prompts are left over: {sorted(left)}")
            require(names | ended | left == every, f"neither trained nor ended: {sorted(every - names - ended - left)}")
            require(not names & ended, f"trained and ended: {sorted(names & ended)}")

    # --- what actors ask of the world ---

    def answer(self, to: Address, message: m.Message, bulk: list[Any]) -> None:
        """Bring an answer on its way."""
        process = self.processes.get(to.peer)
        self.trace(f"broker answers {to.peer.decode()} {to.request}: {m.wire_name(type(message))}")
        if process is not None:
            self.network.carry(process.name, lambda: process.hear(to.request, message, bulk))

    def hint(self, hint: m.Hint) -> None:
        """Publish to every worker; each may miss it."""
        for worker in [*self.workers, *self.guests]:
            if not worker.is_dead:
                self.network.carry(worker.name, lambda worker=worker: worker.later(0.0, lambda: worker.told(hint)))

    def new_worker(self) -> Worker:
        """One that nobody has seen before."""
        return Worker(self, f"w{self.timeline.serial()}", scenarios.worker_plan(self.random))

    def counts_on(self, worker: Worker) -> bool:
        """False for one that another has taken the place of."""
        return worker in self.workers or worker in self.guests

    def replace_worker(self, old: Worker, new: Worker) -> None:
        """`new` takes the place of `old`."""
        among = self.workers if old in self.workers else self.guests
        among[among.index(old)] = new

    def is_poison(self, group: str) -> bool:
        """True for a prompt that ends whatever works on it."""
        return self.scenario.poison > 0 and hash_of(group) % self.scenario.poison == 0

    def bound_of(self, reply: m.BatchReply) -> float:
        """The staleness bound in force for a batch, as it says; it must be one that somebody has set."""
        bound = float("inf") if reply.max_staleness is None else reply.max_staleness
        require(bound in self.bounds, f"batch {reply.step} of bound {bound}; only {sorted(self.bounds)} were ever set")
        return bound

    def version_of(self, step: int) -> int:
        """The version trained in a step: one a publish, every K steps."""
        return step // self.rules.publish_interval

    def wall_of(self, name: str) -> float:
        """The time of day on the machine where a process of this name runs."""
        return 1e6 + self.now + self.skew_of(name)

    def skew_of(self, name: str) -> float:
        """How far that clock is ahead."""
        return self._skews.get(name, 0.0)

    def skew(self, name: str, seconds: float) -> None:
        """Set that clock."""
        self._skews[name] = seconds

    # --- telling ---

    def trace(self, text: str) -> None:
        """Remember what happened; told when something breaks, or at once when verbose."""
        line = f"{self.events:6d} {self.now:9.3f} s  {text}"
        self.recent.append(line)
        if self.is_verbose:
            print(line)


def hash_of(group: str) -> int:
    """A number of a group's own, the same in every process."""
    return sum(ord(c) * (i + 1) for i, c in enumerate(group))


__all__ = ["Broken", "World"]

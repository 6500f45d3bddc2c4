"""The real state machine among simulated workers, a trainer, a disk and a network, on a virtual clock.

Everything follows from the seed: the same seed replays to the same event. Faults happen until `scenario.calm_at`; what
must hold is in invariants.py, what goes wrong in faults.py.
"""

import random
from collections import Counter, deque
from typing import Any

import msgspec
from simulation import faults as fault_kinds
from simulation import scenario as scenarios
from simulation.actor import Actor, Broken, require
from simulation.broker_process import BrokerProcess
from simulation.invariants import Invariants
from simulation.network import Network
from simulation.trainer import Account, Checkpoint, Trainer
from simulation.worker import Worker

from broker.simulate.timeline import Timeline
from broker.state.effects import Address
from broker.state.rules import Rules
from slimebus.bus import messages as m

TRACED = 40
LONGEST_STEP_S = 150.0
"""Once faults are over, no step takes longer: four groups of the slowest worker, and the longest silence before it is noticed."""
WORKER_RESTART_S = 12.0
LAST_EVENT = 200_000
NO_ROOM_EVERY = 10
"""Worlds of which one has no room for the last version."""


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
        self.half_open: dict[bytes, float] = {}
        """Connections of processes whose machine has lost its power, and until when the broker's machine does not know."""
        self.handed_out: dict[tuple[bytes, int], list[str]] = {}
        self.clock_jumps: list[float] = []
        """When the clocks of the broker's machine jumped."""
        self.clock_rates: dict[str, float] = {}
        """Seconds that the clock of a process's machine shows for one second; 1 where it is right."""
        self._progress_at = 0.0
        self.bounds, self.batch_sizes = {self.rules.max_staleness}, {self.rules.batch_size}
        self.account = Account()
        self.invariants = Invariants(self)
        self.network = Network(self.timeline, self.random, lambda: self.is_calm, roughness=self.scenario.roughness)
        self.broker = BrokerProcess(self)
        self.broker.start()
        self.guests: list[Worker] = []
        self.checkpoints = [Checkpoint()]
        """In the run's folder, the newest last; every trainer saves there and goes on from there."""
        self.trainer = Trainer(self, "t")
        self.workers = [Worker(self, self.scenario.name_of(i), plan) for i, plan in enumerate(self.scenario.workers)]
        if faults:
            fault_kinds.schedule_faults(self, only)

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

    @property
    def num_steps(self) -> int:
        """Trained so far."""
        return len(self.trainer.trained)

    def run(self) -> None:
        """Let everything happen until the run has ended."""
        while not self._has_ended():
            self.step()
        self._check_end()

    def step(self) -> None:
        """One event: a turn of the broker or whatever happens next elsewhere."""
        wake_at = self.broker.wake_at()
        if wake_at <= self.timeline.next_at():
            self.timeline.now = max(self.now, wake_at)
            self.events += self.broker.turn()
        else:
            self.events += 1
            self.timeline.step()
        stalled_s = self.now - max(self._progress_at, self.scenario.calm_at)
        if self.broker.is_over and not self.trainer.is_done:  # someone still needs it: it is restarted
            self.broker.start()
        if stalled_s > self._longest_step_s() or self.events > LAST_EVENT:
            raise Broken(f"no progress for {stalled_s:.0f} s: {self._picture()}")

    def _longest_step_s(self) -> float:
        """A prompt that ends its worker is dead after 3 x max_attempts of them, each of which is missed for a while and starts again."""
        rules = self.scenario.rules
        ends_s = 3 * rules.max_attempts * (rules.client_timeout_s + WORKER_RESTART_S) if self.scenario.poison else 0.0
        return (LONGEST_STEP_S + ends_s) * self.scenario.slowness

    def progressed(self) -> None:
        """The trainer has trained a step or finished, or one more held-out prompt is scored after that: the broker waits for the last."""
        self._progress_at = self.now

    def extend(self) -> None:
        """Start a finished run again with more steps: the broker, workers and a trainer, in any order."""
        num_steps = (self.rules.num_steps or 0) + self.scenario.more_steps
        rules = msgspec.structs.replace(self.rules, num_steps=num_steps)
        self.trace(f"somebody has the run go on to step {num_steps}")
        self.faults["extend"] += 1
        self.scenario = msgspec.structs.replace(self.scenario, rules=rules, more_steps=0)
        done = self.trainer
        self.checkpoints.append(Checkpoint(done.step, dict(done.trained), done.lineage))
        self.broker.is_over = False
        self.broker.crash(down_s=self.random.uniform(0, 3))
        self.timeline.later(self.random.uniform(0, 6), lambda: self._train_on(done))
        for worker in self.workers:
            if worker.is_dead or worker.is_leaving:
                self.timeline.later(self.random.uniform(0, 6), worker.start_again)

    def _train_on(self, done: Trainer) -> None:
        if self.trainer is done:
            done.die()
            self.trainer = Trainer(self, done.name)

    def _has_ended(self) -> bool:
        """Who comes when the broker has ended finds nobody, and gives up."""
        if self.scenario.more_steps or not (self.trainer.is_done and self.trainer.is_dead):
            return False
        return self.broker.is_over or (self._is_left_alone() and all(worker.is_dead for worker in [*self.workers, *self.guests]))

    def _is_left_alone(self) -> bool:
        """A broker restarted after everyone had left waits for more."""
        machine = self.broker.machine
        return machine is not None and machine.state.meta.finishing and not machine.state.had_members

    def _picture(self) -> Any:
        machine = self.broker.machine
        return "the broker is down" if machine is None else machine.status(self.broker.broker_clock.now)["waiting"]

    def _check_end(self) -> None:
        trained, rules = self.trainer.trained, self.rules
        if rules.num_steps is not None:
            require(sorted(trained) == list(range(rules.num_steps)), f"trained steps {sorted(trained)} of {rules.num_steps}")
        require(all(len(groups) in self.batch_sizes for groups in trained.values()), "a batch of another size")
        machine = self.broker.machine
        assert machine is not None
        self.invariants.deep(machine)
        holders = {group.lease.worker for group in machine.state.groups.by_lease.values()}
        require(all(machine.state.clients[name].is_gone for name in holders), f"{holders} hold leases after everyone has left")
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
            both = names & ended - self.account.may_repeat  # a prompt that is sampled again may end in another way
            require(not both, f"trained and ended: {sorted(both)}")

    # --- what actors ask of the world ---

    @property
    def oldest_checkpoint(self) -> int:
        """The step of the oldest checkpoint in the run's folder."""
        return min(checkpoint.step for checkpoint in self.checkpoints)

    def answer(self, to: Address, message: m.Message, bulk: list[Any]) -> None:
        """Bring an answer on its way."""
        process = self.processes.get(to.peer)
        self.trace(f"broker answers {to.peer.decode()} {to.request}: {m.wire_name(type(message))}")
        if process is not None:
            self.network.carry(process.name, lambda: process.hear(to.request, message, bulk), process.reconnect)

    def is_connected(self, peer: bytes) -> bool:
        """What the broker's machine knows of a connection."""
        return peer in self.processes or self.half_open.get(peer, 0.0) > self.now

    def hint(self, hint: m.Hint) -> None:
        """Publish to every worker; each may miss it."""
        for worker in [*self.workers, *self.guests]:
            if not worker.is_dead:
                self.network.carry(worker.name, lambda worker=worker: worker.later(0.0, lambda: worker.told(hint)), worker.reconnect)

    def new_worker(self) -> Worker:
        """One that nobody has seen before."""
        return Worker(self, self.scenario.name_of(self.timeline.serial()), self.scenario.worker_plan(self.random))

    def counts_on(self, worker: Worker) -> bool:
        """False for one that another has taken the place of."""
        return worker in self.workers or worker in self.guests

    def joined(self, worker: Worker) -> None:
        """It has the place of whoever had its name."""
        for old in [w for w in [*self.workers, *self.guests] if w.name == worker.name and w is not worker]:
            self.replace_worker(old, worker)

    def replace_worker(self, old: Worker, new: Worker) -> None:
        """`new` takes the place of `old`."""
        among = self.workers if old in self.workers else self.guests
        among[among.index(old)] = new

    def can_pull(self, version: int) -> bool:
        """Weights come from the trainer until it has left after its last step; in some worlds no worker has room for the last version."""
        num_steps, interval = self.rules.num_steps or 0, self.rules.publish_interval
        is_last = 0 < num_steps == version * interval
        has_left = self.trainer.is_done and self.trainer.is_dead
        return not has_left and not (is_last and self.seed % NO_ROOM_EVERY == 0)

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

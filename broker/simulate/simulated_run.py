"""The real state machine among timed workers and a timed trainer.

Broker time stands still: waits, leases and silence are not what is asked about here, and 10,000 workers without heartbeats are quicker
by far.
"""

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from broker.simulate.engine import SimulatedEngine, SimulatedGroup
from broker.simulate.timeline import Timeline
from broker.simulate.workload import Workload
from broker.state.effects import Address, Event, Reply
from broker.state.prompt_source import Prompt, PromptSource
from broker.state_machine import StateMachine
from slimebus.bus import messages as m
from slimebus.bus.errors import SlimebusError
from slimebus.bus.sample_table import TOKEN_FIELDS, SampleTable, encode_table

RUN, LINEAGE, TRAINER = "simulated", "simulated", "trainer"
BROKER_NOW = 0.0
WAIT_S = 3600.0
AHEAD = 2
"""Batches that a trainer has asked for: the one it trains, and the next one."""
TOGETHER = 1e-3
"""Of a step's time: what happens within it reaches the broker in one burst, as with a real one that is busy."""
WARM_SHARE, MAX_WARM = 0.1, 20


class SimulationOutcome(msgspec.Struct, kw_only=True):
    """What came of it, from the end of the first steps on. Idle: share of the time. lag_tokens: staleness -> trained tokens.

    lag_mean: over samples, by their oldest token. worker_tokens_per_s: of one that is busy, evaluations included.
    """

    steps_per_s: float
    tokens_per_s: float
    trainer_idle: float
    worker_idle: float
    worker_tokens_per_s: float
    lag_mean: float
    lag_tokens: dict[int, float]
    wasted_tokens: float
    """Share of all sampled tokens."""
    wasted_groups: dict[str, int]
    seconds: float


def num_warm(steps: int) -> int:
    """The first steps of so many, in which the pipeline fills: they are left out of all rates."""
    return min(MAX_WARM, int(WARM_SHARE * steps))


class EndlessPrompts(PromptSource):
    """Prompts that are nothing but numbers."""

    def take(self, position: int) -> Prompt:
        """The prompt of a position."""
        return Prompt(f"0/{position}", position, b"prompt")


class SimulatedWorker:
    """One worker: its engine, and what it leases."""

    __slots__ = ("engine", "groups", "is_asking", "is_busy", "name", "turn")

    def __init__(self, name: str, engine: SimulatedEngine) -> None:
        self.name, self.engine = name, engine
        self.groups: dict[int, SimulatedGroup] = {}
        self.is_asking = self.is_busy = False
        self.turn = 0
        """Which of the planned looks at the engine is the valid one."""

    def room(self, workload: Workload) -> int:
        """Groups of the usual size that it can begin now."""
        samples = sum(1 if group.is_evaluated else workload.samples for group in self.groups.values())
        return workload.groups_per_worker - math.ceil(samples / workload.samples)


class SimulatedRun:
    """`run` plays all steps and says what came of it. Raises SlimebusError where the machine refuses what is asked."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.timeline, self.random = workload, Timeline(), random.Random(workload.seed)
        self.machine = StateMachine(workload.rules(), EndlessPrompts(), run=RUN)
        self._events: deque[Event] = deque()
        self._done: dict[Address, Callable[[Any], None]] = {}
        self._epochs: dict[str, int] = {}
        self.workers: list[SimulatedWorker] = []
        self._unasked: deque[SimulatedWorker] = deque()
        self._asking: dict[str, SimulatedWorker] = {}
        self._most_asking = self.machine.state.rules.capacity
        self.step, self.serving = 0, m.NO_VERSION
        self.batches: dict[int, m.BatchReply] = {}
        self.is_training = self.is_over = False
        self._waits_since = 0.0
        self.made: dict[str, SimulatedGroup] = {}
        self.idle_s = self.tokens = self.wasted = self.sampled = 0.0
        self.busy_s, self._num_busy, self._counted_at = 0.0, 0, 0.0
        self.lag_tokens: defaultdict[int, float] = defaultdict(float)
        self.lag_samples: defaultdict[int, int] = defaultdict(int)
        self._warm = num_warm(workload.steps)
        self._together_s = TOGETHER * workload.train_seconds(workload.batch * workload.samples * workload.mean_length)
        self._frames: dict[tuple[tuple[int, ...], int], list[bytes]] = {}
        self._warm_at = self._warm_made = 0.0

    def run(self) -> SimulationOutcome:
        """Play every step."""
        self._join(
            TRAINER, "trainer", lambda _: self._send_request(TRAINER, m.Resume(step=0, version=0, lineage=LINEAGE), lambda _: self._begin())
        )
        for i in range(self.workload.workers):
            self._start_worker(f"w{i}")
        while not self.is_over:
            self._apply()
            until = self.timeline.next_at() + self._together_s
            while self.timeline.next_at() <= until and not self.is_over:
                self.timeline.step()
        return self._outcome()

    # --- the machine ---

    def _join(self, name: str, role: Any, then: Callable[[Any], None]) -> None:
        def joined(welcome: m.Welcome) -> None:
            self._epochs[name] = welcome.epoch
            then(welcome)

        self._epochs[name] = 0
        self._send_request(name, m.Hello(role=role, instance=f"{name}#{self.timeline.serial()}"), joined)

    def _send_request(
        self, sender: str, message: m.Message, done: Callable[[Any], None] = lambda _: None, bulk: Sequence[bytes] = ()
    ) -> None:
        """Send a request; `done` gets its answer."""
        to = Address(sender.encode(), self.timeline.serial())
        self._done[to] = done
        self._events.append(Event(to=to, sender=sender, epoch=self._epochs[sender], run=RUN, message=message, bulk=bulk))

    def _apply(self) -> None:
        """Have the machine decide on what was asked, and on what its answers lead to."""
        while self._events:
            burst = list(self._events)
            self._events.clear()
            for effect in self.machine.apply(burst, BROKER_NOW):
                if isinstance(effect, Reply):
                    self._answer(effect)

    def _answer(self, reply: Reply) -> None:
        if isinstance(reply.message, m.Error):
            raise SlimebusError(f"the simulated broker refused: {reply.message.text}", code=reply.message.code)
        self._done.pop(reply.to)(reply.message)

    # --- the trainer ---

    def _begin(self) -> None:
        self._publish(0)
        self._next_step()

    def _publish(self, version: int) -> None:
        self._send_request(TRAINER, m.Publish(lineage=LINEAGE, version=version, publishers=["tcp://x:1"], digest="d"))
        self.timeline.later(self.workload.pull_s, lambda: self._pulled(version))

    def _next_step(self) -> None:
        self._waits_since = self.timeline.now
        if self.step == self._warm:
            self._count(0)
            self._warm_at, self._warm_made = self.timeline.now, sum(worker.engine.made for worker in self.workers)
            self.idle_s = self.tokens = self.wasted = self.sampled = self.busy_s = 0.0
            self.lag_tokens.clear()
            self.lag_samples.clear()
        for step in range(self.step, min(self.step + AHEAD, self.workload.steps)):
            if step not in self.batches:
                self.batches[step] = m.BatchReply(step=step)
                self._send_request(TRAINER, m.Batch(step=step, wait_s=WAIT_S, trained=self.step), self._got_batch)
        self._train_if_ready()

    def _got_batch(self, batch: m.BatchReply) -> None:
        self.batches[batch.step] = batch
        self._train_if_ready()

    def _train_if_ready(self) -> None:
        batch = self.batches.get(self.step)
        if self.is_training or batch is None or not batch.groups:
            return
        self.is_training = True
        self._count(0)
        self.idle_s += self.timeline.now - self._waits_since
        tokens = 0.0
        for group in batch.groups:
            made = self.made.pop(group.group)
            tokens += made.tokens
            for version, count in made.runs.items():
                self.lag_tokens[batch.version - version] += count
            for version, samples in made.oldest.items():
                self.lag_samples[batch.version - version] += samples
        self.tokens += tokens
        self.timeline.after_work(self.workload.train_seconds(tokens) + self.workload.publish_s, self._trained)

    def _count(self, busy: int) -> None:
        """Count the time of workers until now; so many more of them are busy from now on; share the cores anew."""
        self.busy_s += self._num_busy * (self.timeline.now - self._counted_at)
        self._counted_at = self.timeline.now
        self._num_busy += busy
        self.timeline.pace = self.workload.pace(self.is_training + self._num_busy * self.workload.worker_cores)

    def _trained(self) -> None:
        batch = self.batches.pop(self.step)
        if batch.next_version > batch.version:
            self._publish(batch.next_version)
        self._send_request(TRAINER, m.Commit(step=self.step, checkpoint=self.step + 1))
        self.step += 1
        self.is_training = False
        self._count(0)
        if self.step < self.workload.steps:
            self._next_step()
        else:
            self.is_over = True

    # --- workers ---

    def _start_worker(self, name: str) -> None:
        worker = SimulatedWorker(name, SimulatedEngine(self.workload, self.random))
        self.workers.append(worker)
        self._join(name, "rollout", lambda _: self._lease(worker) if self.serving != m.NO_VERSION else None)

    def _pulled(self, version: int) -> None:
        """Every worker serves a version; those that wait for a lease say so at once."""
        is_first, self.serving = self.serving == m.NO_VERSION, version
        for worker in self.workers:
            if worker.groups:
                worker.engine.take_version(version, self.timeline.worked, load_s=self.workload.load_s)
                self._look_at_engine(worker)
            if is_first:
                self._lease(worker)
        for name in self._asking:
            self._send_request(name, m.Heartbeat(state="serving", lineage=LINEAGE, serving=version))

    def _lease(self, worker: SimulatedWorker) -> None:
        """Ask for as much as it has room for. More waiting requests than groups could be given to are not sent: nobody would answer."""
        want = worker.room(self.workload)
        if worker.is_asking or want < 1:
            return
        worker.is_asking = True
        if len(self._asking) >= self._most_asking:
            self._unasked.append(worker)
        else:
            self._send_lease(worker, want)

    def _send_lease(self, worker: SimulatedWorker, want: int) -> None:
        self._asking[worker.name] = worker
        lease = m.Lease(want=want, wait_s=WAIT_S, lineage=LINEAGE, serving=self.serving)
        self._send_request(worker.name, lease, lambda reply: self._leased(worker, reply))

    def _leased(self, worker: SimulatedWorker, reply: m.LeaseReply) -> None:
        worker.is_asking = False
        self._asking.pop(worker.name, None)
        if self._unasked:
            other = self._unasked.popleft()
            self._send_lease(other, other.room(self.workload))
        for leased in reply.groups:
            group = SimulatedGroup(leased.group, leased.lease, leased.num_samples, is_evaluated=leased.kind == "eval")
            worker.groups[leased.lease] = group
            worker.engine.begin(group, self.serving, self.timeline.worked)
        self._look_at_engine(worker)
        self._lease(worker)

    def _look_at_engine(self, worker: SimulatedWorker) -> None:
        """Come back when its next sample is done, unless something changes before."""
        worker.turn += 1
        turn, at = worker.turn, worker.engine.next_at()
        if worker.is_busy != (at < float("inf")):
            worker.is_busy = not worker.is_busy
            self._count(1 if worker.is_busy else -1)
        if worker.is_busy:
            self.timeline.after_work(at - self.timeline.worked, lambda: self._sample_done(worker, turn))

    def _sample_done(self, worker: SimulatedWorker, turn: int) -> None:
        if turn != worker.turn:
            return
        group = worker.engine.finish_next(self.timeline.worked)
        if group is not None:
            self.timeline.later(self.workload.overhead_s, lambda: self._put(worker, group))
        self._look_at_engine(worker)

    def _put(self, worker: SimulatedWorker, group: SimulatedGroup) -> None:
        del worker.groups[group.lease]
        put, samples = m.Put(group=group.id, lease=group.lease, lineage=LINEAGE), 1 if group.is_evaluated else self.workload.samples
        self._send_request(worker.name, put, lambda _: self._was_put(group), self._bulk(tuple(sorted(group.runs)), samples))
        self._lease(worker)

    def _was_put(self, group: SimulatedGroup) -> None:
        if group.is_evaluated:
            return
        self.sampled += group.tokens
        if group.id in self.made:  # it was too stale, and its prompt was sampled again
            self.wasted += self.made[group.id].tokens
        self.made[group.id] = group

    def _bulk(self, versions: tuple[int, ...], samples: int) -> list[bytes]:
        """Samples of one token for each version: the machine asks for no more than these, and how many there are is kept here."""
        if (versions, samples) not in self._frames:
            n, k = samples, len(versions)
            fields = [m.Field(name=name, dtype=dtype) for name, dtype in TOKEN_FIELDS.items()]
            table = SampleTable(num_tokens=[k] * n, versions=[[(v, 1) for v in versions]] * n, fields=fields)
            table.reward, table.status = [0.0] * n, ["completed"] * n
            self._frames[versions, samples] = [encode_table(table), bytes(4 * n * k), b"\1" * (n * k), bytes(4 * n * k)]
        return self._frames[versions, samples]

    # --- the end ---

    def _outcome(self) -> SimulationOutcome:
        self._count(0)
        seconds = max(1e-9, self.timeline.now - self._warm_at)
        made = sum(worker.engine.made for worker in self.workers) - self._warm_made
        return SimulationOutcome(
            steps_per_s=(self.workload.steps - self._warm) / seconds,
            tokens_per_s=self.tokens / seconds,
            trainer_idle=self.idle_s / seconds,
            worker_idle=max(0.0, 1 - self.busy_s / (seconds * self.workload.workers)),
            worker_tokens_per_s=made / max(1e-9, self.busy_s),
            lag_mean=sum(k * n for k, n in self.lag_samples.items()) / (sum(self.lag_samples.values()) or 1),
            lag_tokens=dict(sorted(self.lag_tokens.items())),
            wasted_tokens=self.wasted / (self.sampled or 1.0),
            wasted_groups={reason: groups for reason, (groups, _) in self.machine.state.meta.waste.items()},
            seconds=self.timeline.now,
        )


def simulate(workload: Workload) -> SimulationOutcome:
    """What a run of this workload comes to."""
    return SimulatedRun(workload).run()

"""The real state machine among simulated workers, a trainer, a disk and a network, on a virtual clock.

Everything follows from the seed: the same seed replays to the same event. After each event the invariants of `check` hold.
"""

import heapq
import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec

from broker.state.effects import Address, Delete, Event, Reply, Save, StoredPayload, StoredPrompt
from broker.state.groups import LEASED, READY
from broker.state.machine import Machine
from broker.state.rules import EvalDataset, Rules
from broker.state.table import Prompt
from broker.store import MemoryStore, Write, unpack_frames
from slimebus import messages as m

CHECK_EVERY = 5
"""Counting every prompt is the slow part; a lost one stays lost, so each fifth event finds it all the same."""
TABLES = ("meta", "clients", "steps", "evaluations", "pushes", "source", "groups")


class Numbers:
    """A source of numbered prompts."""

    fingerprint = "numbers"

    def __init__(self, size: int, epochs: int) -> None:
        self.size, self.epochs = size, epochs

    def take(self, position: int) -> Prompt | None:
        if position >= self.size * self.epochs:
            return None
        return Prompt(f"{position // self.size}/{position % self.size}", position, b"prompt")

    def find(self, prompt_id: str) -> Prompt | None:
        epoch, row = map(int, prompt_id.split("/"))
        return self.take(epoch * self.size + row)


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """One simulated run. Faults happen before `calm_at`; the run must end by `end_at`."""

    def __init__(self, seed: int, *, faults: bool = True) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        self.rules = Rules(
            batch_size=pick([1, 2, 4]),
            max_staleness=pick([0, 1, 2, 3, float("inf")]),
            publish_interval=pick([1, 1, 2]),
            num_steps=pick([6, 10]),
            on_stale=pick(["requeue", "drop", "wait"]),
            lease_s=5.0,
            heartbeat_s=1.0,
            client_timeout_s=6.0,
            max_attempts=4,
            buffer_capacity=pick([4, 16, 64]),
            eval_datasets=pick([{}, {"held": EvalDataset(num_prompts=3, num_samples=2)}]),
            eval_interval=pick([0, 2]),
        )
        self.faults = faults
        self.calm_at, self.end_at = (self.random.uniform(20, 60), 2000.0) if faults else (0.0, 500.0)
        self.loss, self.repeat = (0.05, 0.05) if faults else (0.0, 0.0)
        self.now, self.events = 0.0, 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.source, self.store = Numbers(1000, 3), MemoryStore()
        self.replies: dict[Address, Callable[[m.Message, list[Any]], None]] = {}
        self.timelines: list[tuple[str, int]] = []
        self.trained: dict[int, list[str]] = {}
        self.machine = self._boot()
        self.finished = False
        self.trainer = Trainer(self)
        self.workers = [Worker(self, f"w{i}", speed=pick([0.3, 1.0, 4.0])) for i in range(pick([1, 2, 5]))]
        if faults:
            self.later(self.random.uniform(1, 10), self._disaster)

    # --- time ---

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._serial), act))

    def run(self) -> None:
        while not self.finished:
            deadline = self.machine.next_deadline()
            if deadline is not None and (not self._queue or deadline <= self._queue[0][0]):
                self.now = max(self.now, deadline)
                self._perform(self.machine.tick(self.now))
            else:
                self.now, _, act = heapq.heappop(self._queue)
                act()
            self.events += 1
            if self.now > self.end_at:
                raise Broken(f"no progress by {self.now:.0f} s: {self.machine.status(self.now)}")
        self._final_check()

    def is_of_timeline(self, lineage: str, version: int) -> bool:
        """True when the newest timeline has had this version of that lineage."""
        names = [name for name, _ in self.timelines]
        return lineage in names and all(version <= base for _, base in self.timelines[names.index(lineage) + 1 :])

    @property
    def is_calm(self) -> bool:
        return self.now >= self.calm_at

    def _disaster(self) -> None:
        if self.is_calm:
            return
        kind = self.random.choice(["broker", "worker", "worker", "trainer", "silence", "doppelganger", "amnesia", "desertion"])
        if kind == "broker":
            self.machine = self._boot()
        elif kind == "worker":
            self.random.choice(self.workers).kill()
        elif kind == "trainer":
            self.trainer.kill()
        elif kind == "silence":
            self.random.choice(self.workers).silent_until = self.now + self.random.uniform(3, 15)
        elif kind == "amnesia":
            self.trainer.checkpoint = self.random.randint(0, self.trainer.checkpoint)
            self.trainer.kill()
        elif kind == "desertion":
            self.workers[0].kill()
            self.workers[0].dead = True
            self.workers.append(Worker(self, f"w{next(self._serial)}", speed=1.0))
            del self.workers[0]
        else:
            self.trainer.dead, old = True, self.trainer
            self.trainer = Trainer(self, name="t2", checkpoint=old.checkpoint)
        self.later(self.random.uniform(2, 10), self._disaster)

    # --- broker ---

    def _boot(self) -> Machine:
        machine = Machine(self.rules, self.source, run="sim", first_id=int(self.now * 1000) + 1, records=self.store.get)
        machine.restore([(t, k, v) for t in TABLES for k, v in self.store.scan(t)], self.now)
        return machine

    def send(self, event: Event, on_reply: Callable[[m.Message, list[Any]], None]) -> None:
        self.replies[event.to] = on_reply
        copies = 0 if self._unlucky(self.loss) else 2 if self._unlucky(self.repeat) else 1
        for _ in range(copies):
            self.later(self.random.expovariate(20), lambda: self._deliver(event))

    def _unlucky(self, chance: float) -> bool:
        return not self.is_calm and self.random.random() < chance

    def _deliver(self, event: Event) -> None:
        may_put = isinstance(event.message, m.Put) and self._holds(event.sender, event.message)
        effects = self.machine.apply([event], self.now)
        accepted = any(isinstance(e, Reply) and e.to == event.to and getattr(e.message, "result", "") == "accepted" for e in effects)
        require(may_put or not accepted, "a put without its lease was accepted")
        self._perform(effects)

    def _holds(self, name: str, put: m.Put) -> bool:
        group = self.machine.state.groups.by_id.get(put.group)
        return group is not None and (group.phase, group.worker, group.lease, group.attempt) == (LEASED, name, put.lease, put.attempt)

    def _perform(self, effects: list[Any]) -> None:
        writes = {
            (e.table, e.key): Write(e.table, e.key, e.value if isinstance(e, Save) else None)
            for e in effects
            if isinstance(e, Save | Delete)
        }
        self.store.commit(list(writes.values()))
        check_bounds(self)
        if self.events % CHECK_EVERY == 0:
            check(self)
        for effect in effects:
            if isinstance(effect, Reply):
                self._answer(effect)

    def _answer(self, reply: Reply) -> None:
        bulk: list[Any] = []
        for part in reply.bulk:
            if isinstance(part, StoredPrompt):
                require(self.store.get("prompts", part.group) is not None, f"leased group {part.group} has no prompt")
            elif isinstance(part, StoredPayload):
                value = self.store.get("payloads", part.group)
                require(value is not None, f"fetched group {part.group} has no payload")
                bulk.append(unpack_frames(value or b""))
        callback = self.replies.get(reply.to)
        if callback is not None and not self._unlucky(self.loss):
            self.later(self.random.expovariate(20), lambda: callback(reply.message, bulk))

    def _final_check(self) -> None:
        names = [name for groups in self.trained.values() for name in groups]
        require(len(names) == len(set(names)), "a group was trained twice in the surviving timeline")
        steps = self.rules.num_steps or 0
        require(sorted(self.trained) == list(range(steps)), f"trained steps {sorted(self.trained)} of {steps}")
        require(all(len(groups) == self.rules.batch_size for groups in self.trained.values()), "a batch of another size")


class Actor:
    """A process: its requests are sent again until they are answered; it dies with `dead`."""

    role = ""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name, self.dead, self.epoch = world, name, False, 0
        self.instance = f"{name}-{next(world._serial)}"
        self.silent_until = 0.0
        self.ask(m.Hello(role=self.role, instance=self.instance, born=1.0 + world.now), self._welcomed)

    def ask(self, message: m.Message, done: Callable[[Any, list[Any]], None], bulk: list[bytes] | None = None) -> None:
        to = Address(self.instance.encode(), next(self.world._serial))
        answered = False

        def receive(reply: m.Message, frames: list[Any]) -> None:
            nonlocal answered
            if self.dead or answered:
                return
            if isinstance(reply, m.Error) and reply.retryable:
                return
            answered = True
            if isinstance(reply, m.Error):
                self.refused(reply)
            else:
                done(reply, frames)

        def attempt() -> None:
            if self.dead or answered:
                return
            if self.world.now >= self.silent_until:
                run = "sim" if self.epoch else ""
                body = msgspec.msgpack.encode(message)
                event = Event(to=to, sender=self.name, epoch=self.epoch, run=run, message=message, body=body, bulk=bulk or [])
                self.world.send(event, receive)
            self.world.later(2.0, attempt)

        attempt()

    def _welcomed(self, welcome: m.Welcome, _: list[Any]) -> None:
        self.epoch = welcome.epoch
        self.begin(welcome)
        self._beat()

    def _beat(self) -> None:
        if not self.dead:
            if self.world.now >= self.silent_until:
                self.ask(self.beat(), lambda reply, _: self.beaten(reply))
            self.world.later(self.world.rules.heartbeat_s, self._beat)

    def beat(self) -> m.Heartbeat:
        return m.Heartbeat()

    def beaten(self, reply: m.HeartbeatReply) -> None: ...

    def begin(self, welcome: m.Welcome) -> None: ...

    def refused(self, error: m.Error) -> None:
        raise Broken(f"{self.name} was refused: {error}")


class Worker(Actor):
    """Leases, works for a while with whatever version it has, puts; pulls new versions on the way."""

    role = "rollout"

    def __init__(self, world: World, name: str, speed: float) -> None:
        self.speed, self.lineage, self.serving = speed, "", m.NO_VERSION
        self.held: dict[int, m.LeasedGroup] = {}
        super().__init__(world, name)

    def kill(self) -> None:
        self.dead = True
        self.world.workers[self.world.workers.index(self)] = Worker(self.world, self.name, self.speed)

    def beat(self) -> m.Heartbeat:
        return m.Heartbeat(state="serving", lineage=self.lineage, serving=self.serving, leases=list(self.held))

    def beaten(self, reply: m.HeartbeatReply) -> None:
        for lease in reply.lost:
            self.held.pop(lease, None)
        if (reply.lineage, reply.version) != (self.lineage, self.serving) and reply.version != m.NO_VERSION:
            if reply.lineage == self.lineage and reply.version < self.serving:
                return  # an old reply, late
            self.lineage, self.serving = reply.lineage, reply.version

    def begin(self, welcome: m.Welcome) -> None:
        self._lease()

    def _lease(self) -> None:
        want = self.world.random.choice([1, 2, 5])
        self.ask(m.Lease(want=want, wait_s=5.0, lineage=self.lineage, serving=self.serving), self._leased)

    def _leased(self, reply: m.LeaseReply, _: list[Any]) -> None:
        for group in reply.groups:
            self.held[group.lease] = group
            seconds = self.world.random.expovariate(1 / self.speed)
            self.world.later(seconds, self._finisher(group, self.lineage, self.serving))
        self.world.later(0.1 if reply.groups else 0.5, self._lease)

    def _finisher(self, group: m.LeasedGroup, lineage: str, version: int) -> Callable[[], None]:
        def finish() -> None:
            if self.dead or group.lease not in self.held:
                return
            luck = self.world.random.random() if not self.world.is_calm else 1.0
            if luck < 0.1:
                outcome = self.world.random.choice(["requeue", "drop", "fail"])
                back = m.GiveBack(group=group.group, lease=group.lease, outcome=outcome, reason="luck")
                self.ask(back, lambda *_: self.held.pop(group.lease, None))
            else:
                self._put(group, lineage, version, failed=luck < 0.2)

        return finish

    def _put(self, group: m.LeasedGroup, lineage: str, version: int, *, failed: bool) -> None:
        newest = self.serving if self.lineage == lineage else version
        runs = [(version, 3), (newest, 2)]
        header = m.SampleHeader(num_tokens=5, num_trainable=5, versions=runs, oldest_version=version, reward=None if failed else 1.0)
        put = m.Put(
            group=group.group, lease=group.lease, attempt=group.attempt, lineage=lineage, samples=[header] * group.num_samples, fields=[]
        )
        self.ask(put, lambda *_: self.held.pop(group.lease, None))

    def refused(self, error: m.Error) -> None:
        require(error.code in ("fenced", "not_joined"), f"{self.name}: {error}")
        if not self.dead:
            self.kill()


class Trainer(Actor):
    """Trains step after step with one batch asked ahead, publishes, commits, checkpoints; restarts from its checkpoint."""

    role = "trainer"

    def __init__(self, world: World, name: str = "t", checkpoint: int = 0) -> None:
        self.checkpoint, self.step = checkpoint, checkpoint
        self.lineage = f"lineage-{next(world._serial)}"
        self.batches: dict[int, m.BatchReply] = {}
        self.asked: set[int] = set()
        super().__init__(world, name)

    def kill(self) -> None:
        self.dead = True
        self.world.trainer = Trainer(self.world, self.name, self.checkpoint)

    def begin(self, welcome: m.Welcome) -> None:
        for step in [s for s in self.world.trained if s >= self.step]:
            del self.world.trained[step]
        self.world.timelines.append((self.lineage, self._version(self.step)))
        self.ask(m.Resume(step=self.step, version=self._version(self.step), lineage=self.lineage), self._resumed)

    def _version(self, step: int) -> int:
        return step // self.world.rules.publish_interval

    def _resumed(self, *_: Any) -> None:
        self._publish(self._version(self.step), self._train)

    def _publish(self, version: int, then: Callable[[], None]) -> None:
        self.ask(m.Publish(lineage=self.lineage, version=version, publishers=["x"]), lambda *_: then())

    def _train(self) -> None:
        if self.step >= (self.world.rules.num_steps or 0):
            self.ask(m.Finish(), lambda *_: None)
            return
        self._ask_batch(self.step)
        if self.step + 1 < (self.world.rules.num_steps or 0):
            self._ask_batch(self.step + 1)

    def _ask_batch(self, step: int) -> None:
        if step not in self.asked:
            self.asked.add(step)
            self.ask(m.Batch(step=step, wait_s=3.0), lambda reply, _: self._got_batch(step, reply))

    def _got_batch(self, step: int, reply: m.BatchReply) -> None:
        if not reply.groups:
            self.asked.discard(step)
            self._ask_batch(step)
            return
        require(reply.version == self._version(step), f"step {step} trains version {self._version(step)}, broker says {reply.version}")
        for group in reply.groups:
            require(self._version(step) - group.oldest_version <= self.world.rules.max_staleness, f"stale: {group} in step {step}")
        self.batches[step] = reply
        if step == self.step:
            self._fetch(step)

    def _fetch(self, step: int) -> None:
        self.ask(m.Fetch(groups=[g.group for g in self.batches[step].groups]), lambda _, bulk: self._fetched(step, bulk))

    def _fetched(self, step: int, bulk: list[Any]) -> None:
        for group, frames in zip(self.batches[step].groups, bulk, strict=True):
            put = msgspec.msgpack.decode(frames[0], type=m.Put)
            require(put.group == group.group, f"asked for {group.group}, got {put.group}")
            oldest = min(version for s in put.samples for version, _ in s.versions)
            require(self._version(step) - oldest <= self.world.rules.max_staleness, f"stale payload {put.group} in step {step}")
            newest = max(version for s in put.samples for version, _ in s.versions)
            require(self.world.is_of_timeline(put.lineage, newest), f"version {newest} of {put.lineage} in {self.world.timelines}")
        self.world.later(self.world.random.expovariate(2), lambda: self._trained(step))

    def _trained(self, step: int) -> None:
        if self.dead:
            return
        self.world.trained[step] = [g.group for g in self.batches[step].groups]
        if self._version(step + 1) != self._version(step):
            self._publish(self._version(step + 1), lambda: self._commit(step))
        else:
            self._commit(step)

    def _commit(self, step: int) -> None:
        interval = self.world.rules.publish_interval
        if self.world.random.random() < 0.4 and (step + 1) % interval == 0:
            self.checkpoint = step + 1
        self.ask(m.Commit(step=step, checkpoint=self.checkpoint), lambda *_: self._committed(step))

    def _committed(self, step: int) -> None:
        self.step = step + 1
        if self.step in self.batches:
            self._train()
            self._fetch(self.step)
        else:
            self._train()

    def beaten(self, reply: m.HeartbeatReply) -> None:
        self.world.finished = self.world.finished or reply.finished

    def refused(self, error: m.Error) -> None:
        require(error.code in ("fenced", "not_joined"), f"{self.name}: {error}")
        require(self.world.trainer is not self or error.code == "not_joined", "the only trainer was fenced")


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def check(world: World) -> None:
    """What holds after each event."""
    state = world.machine.state
    groups = state.groups
    freed = {name for record in state.steps.values() if record.step < state.meta.floor for name in record.groups}
    ended = {key for key, _ in world.store.scan("ended")}
    live = {name for name, group in groups.by_id.items() if group.kind == "train"}
    drawn = {f"{p // 1000}/{p % 1000}" for p in range(state.meta.cursor)}
    require(live | ended | freed == drawn, f"lost or invented prompts: {(live | ended | freed) ^ drawn}")
    require(len(live) + len(ended) + len(freed) == len(drawn), "a prompt is in two places")
    require(live <= {key for key, _ in world.store.scan("prompts")}, "a prompt record is missing")
    require({k for k, _ in world.store.scan("groups")} == set(groups.by_id), "the store does not hold the groups in play")
    leased = {g.lease for g in groups.by_id.values() if g.phase == LEASED}
    require(leased == set(groups.by_lease) == set(state.lease_deadlines), "a lease leaks")
    require(min(state.lease_deadlines.values(), default=world.now) >= world.now, "a lease outlives its deadline")
    ready = sorted((g for g in groups.by_id.values() if g.phase == READY), key=lambda g: g.admitted)
    require([name for _, name in groups.ready] == [g.id for g in ready], "the ready list is out of order")


def check_bounds(world: World) -> None:
    """What is cheap to look at, after each event."""
    state = world.machine.state
    bound = state.rules.buffer_capacity + 2 * state.rules.batch_size * (state.rules.num_steps or 1)
    require(state.num_held <= bound, "the buffer overflows")
    require(len(state.parked_leases) <= state.rules.max_parked, "parked requests overflow")

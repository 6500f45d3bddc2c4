"""A broker's state machine at a desk: requests go in, answers come out, time moves when told."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from made_samples import frames, made
from numbered_prompts import NumberedPrompts

from broker.request_loop import RESTORED_TABLES
from broker.state.effects import Address, Event, Note, Notify, Record, Reply, StepHistory, Write
from broker.state.records import BufferFilter
from broker.state.rules import Rules
from broker.state_machine import StateMachine
from broker.store import MemoryStore
from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.errors import ProtocolError


class Desk:
    """One machine with a memory store, a clock, and short names for what workers and trainers do."""

    def __init__(self, prompts: int = 100, **rules: Any) -> None:
        settings: dict[str, Any] = {"batch_size": 2, "max_staleness": 1, "lease_s": 10.0, "heartbeat_s": 1.0, "client_timeout_s": 20.0}
        self.rules = Rules(**(settings | rules))
        self.source, self.store, self.now, self.request, self.first_id = NumberedPrompts(prompts), MemoryStore(), 100.0, 0, 1
        self.epochs: dict[str, int] = {}
        self.answers: dict[int, m.Message] = {}
        self.hints: list[m.Hint] = []
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.step_histories: list[StepHistory] = []
        self.buffer_filter: BufferFilter | None = None
        self.store_problem = ""
        self._burst: list[Event] | None = None
        self.machine = self._boot()

    def _boot(self) -> StateMachine:
        how: dict[str, Any] = {"first_id": self.first_id, "buffer_filter": self.buffer_filter}
        machine = StateMachine(self.rules, self.source, run="r", max_message_bytes=10_000, **how)
        machine.restore([(t, k, v) for t in RESTORED_TABLES for k, v in self.store.scan(t)], self.now)
        return machine

    def restart(self) -> None:
        """The broker process dies and comes back."""
        self.machine = self._boot()

    @property
    def state(self) -> Any:
        return self.machine.state

    @property
    def status(self) -> dict[str, Any]:
        return self.machine.status(self.now)

    def perform(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Write):
                self.store.commit([effect])
            elif isinstance(effect, Reply):
                self.answers[effect.to.request] = effect.message
            elif isinstance(effect, Notify):
                self.hints.append(effect.hint)
            elif isinstance(effect, Note):
                self.notes.append(effect.text)
            elif isinstance(effect, Record):
                self.rows.append(effect.row)
            elif isinstance(effect, StepHistory):
                self.step_histories.append(effect)

    def send(
        self, name: str, message: m.Message, *, request: int = 0, epoch: int | None = None, bulk: list[bytes] | None = None, run: str = "r",
        is_alone: bool = False, key: str = "",
    ) -> int:  # fmt: skip
        """Send a request; its answer appears in `answers` under the returned id. is_alone: whoever it replaces is connected no more."""
        self.request += 1
        number = request or self.request
        try:
            header = envelope.decode_header(envelope.encode(message, id=number, sender=name))
            message = envelope.decode_body(header)
        except ProtocolError as bad:
            self.answers[number] = envelope.error_reply(bad)
            return number
        event = Event(
            to=Address(name.encode(), number),
            sender=name,
            epoch=self.epochs.get(name, 0) if epoch is None else epoch,
            run=run,
            message=message,
            bulk=bulk or [],
            key=key,
        )
        if self._burst is None:
            lost = self.machine.conflicting_peers([event]) if is_alone else ()
            self.perform(self.machine.apply([event], self.now, store_problem=self.store_problem, lost_peers=lost))
        else:
            self._burst.append(event)
        return number

    @contextlib.contextmanager
    def burst(self) -> Iterator[None]:
        """What is sent within this context reaches the machine at once."""
        self._burst = []
        yield
        events, self._burst = self._burst, None
        self.perform(self.machine.apply(events, self.now, store_problem=self.store_problem))

    def ask(self, name: str, message: m.Message, **how: Any) -> Any:
        """Send a request and return its answer, None while it is parked."""
        number = self.send(name, message, **how)
        return self.answers.pop(number, None)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.perform(self.machine.tick(self.now))

    # --- what clients do ---

    def join(self, name: str, role: str, instance: str = "1") -> m.Welcome:
        """A process comes, with --take-over, and speaks."""
        welcome = self.ask(name, m.Hello(role=role, instance=instance, take_over=True), epoch=0)
        assert isinstance(welcome, m.Welcome), welcome
        self.epochs[name] = welcome.epoch
        self.ask(name, m.Heartbeat())
        return welcome

    def begin(self, step: int = 0, version: int = 0, lineage: str = "L") -> None:
        """A trainer joins and publishes its first version; worker w joins."""
        if "t" not in self.epochs:
            self.join("t", "trainer")
            self.join("w", "rollout")
        assert self.ask("t", m.Resume(step=step, version=version, lineage=lineage)) == m.Ok()
        self.publish(version, lineage)

    def publish(self, version: int, lineage: str = "L") -> None:
        assert self.ask("t", m.Publish(lineage=lineage, version=version, publishers=["tcp://p:1"], digest="d")) == m.Ok()

    def lease(self, want: int = 1, serving: int = 0, name: str = "w", lineage: str = "L") -> list[m.LeasedGroup]:
        reply = self.ask(name, m.Lease(want=want, wait_s=0.0, lineage=lineage, serving=serving))
        assert isinstance(reply, m.LeaseReply), reply
        return reply.groups

    def put(
        self, group: m.LeasedGroup, version: int = 0, name: str = "w", lineage: str = "L", rewards: tuple[Any, ...] = (1.0,)
    ) -> m.PutReply:
        rewards += rewards[-1:] * (group.num_samples - len(rewards))
        samples = [made((version, 4), reward=reward) for reward in rewards]
        put = m.Put(group=group.group, lease=group.lease, lineage=lineage)
        return self.ask(name, put, bulk=frames(*samples, num_samples=group.num_samples))

    def fill(self, count: int, version: int = 0, lineage: str = "L") -> list[str]:
        """Lease and put `count` groups."""
        groups = self.lease(count, version, lineage=lineage)
        for group in groups:
            assert self.put(group, version, lineage=lineage).result == "accepted"
        return [group.group for group in groups]

    def batch(self, step: int) -> list[str]:
        reply = self.ask("t", m.Batch(step=step, wait_s=0.0))
        assert isinstance(reply, m.BatchReply), reply
        return [group.group for group in reply.groups]

    def train(self, step: int, checkpoint: int = 0, lineage: str = "L") -> list[str]:
        """Take the batch of a step, publish the next version and commit."""
        groups = self.batch(step)
        assert groups
        self.publish(self.state.version_of(step + 1), lineage)
        assert self.ask("t", m.Commit(step=step, checkpoint=checkpoint)) == m.Ok()
        return groups


@pytest.fixture
def desk() -> Desk:
    """Two groups a step, staleness 1, a trainer and a worker at version 0."""
    desk = Desk()
    desk.begin()
    return desk


@pytest.fixture
def new_desk() -> type[Desk]:
    """For other rules: `new_desk(max_staleness=0)`."""
    return Desk


@pytest.fixture
def begun_desk() -> Callable[..., Desk]:
    """The same, with a trainer and a worker at version 0."""

    def make(**rules: Any) -> Desk:
        desk = Desk(**rules)
        desk.begin()
        return desk

    return make

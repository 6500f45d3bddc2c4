"""A store that cannot be written: nothing of the burst is said, nothing is lost or repeated, and the run goes on by itself."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_samples import frames, made
from manual_clock import ManualClock
from numbered_prompts import NumberedPrompts

from broker.request_loop import Broker
from broker.state.effects import StepHistory
from broker.state.rules import Rules
from broker.store import MemoryStore, StoreError, Write
from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.transport.server import Request


class FailingStore(MemoryStore):
    """Takes nothing while `problem` is set; `full` is what it says at the door."""

    def __init__(self) -> None:
        super().__init__()
        self.problem: StoreError | None = None
        self.full = ""
        self.commits = 0

    def commit(self, writes: Sequence[Write]) -> None:
        self.commits += 1
        if self.problem is not None:
            raise self.problem
        super().commit(writes)

    def refusal(self, size_bytes: int) -> str:
        return self.full


class Bench:
    """A broker whose clock, store and requests are in the test's hand."""

    def __init__(self, store: Any) -> None:
        self.clock, self.store = ManualClock(100.0), store
        rules = Rules(batch_size=1, max_staleness=2, lease_s=10.0, heartbeat_s=1.0, client_timeout_s=5.0, max_attempts=1)
        self.broker = Broker(rules, NumberedPrompts(), store, run="r", clock=self.clock)
        self.arriving: list[Request] = []
        self.meanwhile: list[Callable[[], object]] = []
        """What happens while the store cannot be written, one after the other; then there is room."""
        self.answers: dict[int, m.Message] = {}
        self.bulk: dict[int, Sequence[Any]] = {}
        self.broker.server.receive = self._receive
        self.broker.server.answer = self._answer
        self.epochs: dict[str, int] = {}
        self.serial = 0

    def _receive(self, timeout_s: float, collect_s: float = 0.0) -> list[Request]:
        if self.broker._blocked is not None:
            self.clock.advance(timeout_s)
            if self.meanwhile:
                self.meanwhile.pop(0)()
            else:
                self.store.problem = None
        arrived, self.arriving = self.arriving, []
        return arrived

    def _answer(self, peer: bytes, request_id: int, message: m.Message, bulk: Sequence[Any] = ()) -> None:
        self.answers[request_id], self.bulk[request_id] = message, bulk

    def send(self, name: str, message: m.Message, number: int = 0, bulk: Sequence[bytes] = ()) -> int:
        self.serial += 1
        number = number or self.serial
        frame = envelope.encode(message, id=number, run="r", sender=name, epoch=self.epochs.get(name, 0))
        self.arriving.append(Request(name.encode(), envelope.decode_header(frame), message, list(bulk)))
        return number

    def ask(self, name: str, message: m.Message, number: int = 0, bulk: Sequence[bytes] = ()) -> m.Message | None:
        number = self.send(name, message, number, bulk)
        self.broker.run_once(0.0)
        return self.answers.pop(number, None)

    def begin(self) -> None:
        for name, role in (("t", "trainer"), ("w", "rollout")):
            welcome = self.ask(name, m.Hello(role=role, instance="1"))
            assert isinstance(welcome, m.Welcome)
            self.epochs[name] = welcome.epoch
        assert self.ask("t", m.Resume(step=0, version=0, lineage="L")) == m.Ok()
        assert self.ask("t", m.Publish(lineage="L", version=0, publishers=["tcp://p:1"], digest="d")) == m.Ok()

    def lease(self, number: int = 0) -> m.Message | None:
        return self.ask("w", m.Lease(want=1, wait_s=0.0, lineage="L", serving=0), number)

    def put(self, group: m.LeasedGroup, number: int = 0) -> m.Message | None:
        message = m.Put(group=group.group, lease=group.lease, lineage="L")
        return self.ask("w", message, number, frames(made((0, 4))))

    def status(self) -> dict[str, Any]:
        number = self.send("someone", m.Status())
        self.broker.run_once(0.0)
        return self.document(number)

    def document(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(bytes(self.bulk[number][0]))
        return found


FULL = StoreError("the disk of the broker's store is full: make room there", code="disk_full")
BROKEN = StoreError("the broker's store cannot be written: Input/output error")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(FailingStore())
    bench.begin()
    yield bench
    bench.broker.close()


def leased(reply: m.Message | None) -> m.LeasedGroup:
    assert isinstance(reply, m.LeaseReply), reply
    return reply.groups[0]


@pytest.mark.parametrize("problem", [FULL, BROKEN])
def test_a_put_is_answered_only_once_it_is_written(bench: Bench, problem: StoreError) -> None:
    group = leased(bench.lease())
    bench.store.problem = problem
    message, parts = m.Put(group=group.group, lease=group.lease, lineage="L"), frames(made((0, 4)))
    first, again = bench.send("w", message, bulk=parts), bench.serial + 1

    def check() -> None:
        assert first not in bench.answers, "not acknowledged"
        assert bench.answers[again] == m.Error(code=problem.code, text=problem.text, retryable=True), "to be asked again"
        assert bench.store.get("payloads", group.group) is None

    bench.meanwhile = [lambda: bench.send("w", message, bulk=parts), check]
    bench.broker.run_once(0.0)
    assert bench.meanwhile == []
    assert bench.answers.pop(first) == m.PutReply(result="accepted")
    assert bench.store.get("payloads", group.group) is not None
    assert bench.put(group, again) == m.PutReply(result="duplicate")
    reply = bench.ask("t", m.Batch(step=0, wait_s=0.0))
    assert isinstance(reply, m.BatchReply)
    assert [g.group for g in reply.groups] == [group.group]


def test_no_lease_expires_and_no_one_is_gone_while_it_cannot_be_written(bench: Bench) -> None:
    group = leased(bench.lease())
    bench.store.problem = FULL
    bench.meanwhile = [lambda: bench.clock.advance(1.0)] * 100
    other = leased(bench.lease())
    bench.broker.run_once(0.0)
    assert isinstance(
        bench.ask("w", m.Heartbeat(lineage="L", serving=0, num_leases=2, lease_sum=group.lease + other.lease)), m.HeartbeatReply
    )
    assert bench.put(group) == m.PutReply(result="accepted")


def test_nothing_is_decided_or_told_while_the_last_decision_is_not_written(bench: Bench) -> None:
    group = leased(bench.lease())
    bench.store.problem = FULL
    asked = [
        ("t", m.Batch(step=0, wait_s=0.0)),
        ("t", m.Commit(step=0)),
        ("t", m.Publish(lineage="L", version=1, publishers=[], digest="d")),
        ("w", m.Heartbeat(lineage="L", serving=0)),
        ("w2", m.Hello(role="rollout", instance="2")),
    ]
    numbers: list[int] = []
    bench.meanwhile = [lambda name=name, message=message: numbers.append(bench.send(name, message)) for name, message in asked]
    assert bench.put(group) == m.PutReply(result="accepted")
    assert [bench.answers[number] for number in numbers] == [m.Error(code="disk_full", text=FULL.text, retryable=True)] * len(asked)
    assert bench.broker.machine.state.meta.version == 0


def test_the_status_says_what_is_wrong_and_for_how_long(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    group = leased(bench.lease())
    bench.store.problem, found, numbers = FULL, list[dict[str, Any]](), list[int]()
    last = [lambda: numbers.append(bench.send("someone", m.Status())), lambda: found.append(bench.document(numbers[0]))]
    bench.meanwhile = [*[lambda: bench.clock.advance(30.0)] * 10, *last]
    bench.put(group)
    (status,) = found
    assert status["store"]["problem"] == FULL.text
    assert 300 < status["store"]["unwritten_s"] < 320
    assert status["waiting"][0] == f"the broker waits for its store: {FULL.text}"
    assert FULL.text in status["stalled"]["reason"]
    assert sum(FULL.text in line for line in caplog.messages) in range(2, 8), "said again, but not each second"
    assert "problem" not in bench.status()["store"]
    assert not bench.status()["waiting"]


def test_a_broker_that_is_told_to_stop_ends_while_it_cannot_be_written(bench: Bench) -> None:
    group, stop = leased(bench.lease()), threading.Event()
    bench.store.problem = FULL
    bench.meanwhile = [stop.set, lambda: pytest.fail("it went on")]
    put = bench.send("w", m.Put(group=group.group, lease=group.lease, lineage="L"), bulk=frames(made((0, 4))))
    bench.broker.run(stop)
    assert put not in bench.answers
    assert bench.broker.last_status()["store"]["problem"] == FULL.text
    bench.store.problem = None
    again = Bench(bench.store)
    again.epochs = bench.epochs
    assert again.broker.machine.state.groups.by_id[group.group].phase == "leased"
    assert again.put(group) == m.PutReply(result="accepted"), "what was not acknowledged is asked again"
    again.broker.close()


def test_without_room_samples_and_leases_are_refused_and_the_trainer_goes_on(bench: Bench) -> None:
    first, second = leased(bench.lease()), leased(bench.lease())
    assert bench.put(first) == m.PutReply(result="accepted")
    bench.store.full = "the disk is full: make room"
    answer = bench.put(second)
    assert answer == m.Error(code="disk_full", text="the disk is full: make room", retryable=True)
    reply = bench.lease()
    assert isinstance(reply, m.LeaseReply)
    assert reply.groups == []
    assert reply.reason == "the disk is full: make room"
    assert isinstance(bench.ask("t", m.Batch(step=0, wait_s=0.0)), m.BatchReply)
    assert bench.ask("t", m.Publish(lineage="L", version=1, publishers=["tcp://p:1"], digest="d")) == m.Ok()
    assert bench.ask("t", m.Commit(step=0, checkpoint=1)) == m.Ok()
    assert bench.store.get("payloads", first.group) is None, "its room is given back"
    assert "disk is full" in bench.status()["waiting"][0]
    bench.store.full = ""
    assert bench.put(second) == m.PutReply(result="accepted")
    assert leased(bench.lease())


def test_a_parked_lease_is_granted_when_there_is_room_again(bench: Bench) -> None:
    bench.store.full = "the disk is full"
    assert bench.ask("w", m.Lease(want=1, wait_s=60.0, lineage="L", serving=0), 77) is None
    bench.store.full = ""
    bench.clock.advance(1.0)
    bench.broker.run_once(0.0)
    assert leased(bench.answers.pop(77))


def test_a_damaged_payload_is_sampled_again_and_its_step_chosen_anew(bench: Bench) -> None:
    group = leased(bench.lease())
    bench.put(group)
    assert isinstance(bench.ask("t", m.Batch(step=0, wait_s=0.0)), m.BatchReply)
    bench.store.commit([Write("payloads", group.group, None)])
    answer = bench.ask("t", m.Fetch(groups=[group.group]))
    assert isinstance(answer, m.Error)
    state = bench.broker.machine.state
    assert state.groups.by_id[group.group].phase == "queued"
    assert state.meta.moves["assigned>queued its stored samples are damaged"] == 1
    assert state.meta.waste["its stored samples are damaged"] == [1, 4]
    assert not state.steps
    second = leased(bench.lease())
    assert second.group == group.group
    bench.put(second)
    reply = bench.ask("t", m.Batch(step=0, wait_s=0.0))
    assert isinstance(reply, m.BatchReply)
    assert [g.group for g in reply.groups] == [group.group]
    assert isinstance(bench.ask("t", m.Fetch(groups=[group.group])), m.FetchReply)


def test_a_damaged_prompt_is_read_from_the_source_again(bench: Bench) -> None:
    group = leased(bench.lease(50))
    bench.store.commit([Write("prompts", group.group, None)])
    answer = bench.lease(50)
    assert isinstance(answer, m.Error)
    assert answer.retryable
    assert leased(bench.lease(50)).group == group.group
    assert bench.store.get("prompts", group.group) == b"\xa6prompt"


def test_damage_found_while_the_disk_is_full_is_mended_once_it_can_be_written(bench: Bench) -> None:
    group = leased(bench.lease())
    bench.put(group)
    assert isinstance(bench.ask("t", m.Batch(step=0, wait_s=0.0)), m.BatchReply)
    bench.store.commit([Write("payloads", group.group, None)])
    bench.store.problem = FULL
    phases = list[str]()
    bench.meanwhile = [lambda: phases.append(msgspec.msgpack.decode(bench.store.get("groups", group.group) or b"")["phase"])]
    first, second = bench.send("t", m.Fetch(groups=[group.group])), bench.send("t", m.Fetch(groups=[group.group]))
    bench.broker.run_once(0.0)
    assert phases == ["assigned"]
    assert isinstance(bench.answers[first], m.Error)
    assert isinstance(bench.answers[second], m.Error)
    row = bench.store.get("groups", group.group)
    assert row is not None
    assert "phase" not in msgspec.msgpack.decode(row), "queued again, on disk too"
    assert bench.store.get("steps", "0") is None


def test_a_commit_that_takes_long_moves_no_group_of_its_step(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    broker = Broker(
        Rules(batch_size=1, max_staleness=2), NumberedPrompts(), MemoryStore(), run="r", clock=clock, metrics_path=tmp_path / "broker.jsonl"
    )
    try:
        clock.advance(0.5)
        decided = broker.broker_clock.advance()
        clock.advance(0.25)  # the store writes
        broker._emit(StepHistory(0, decided, 0.1, 0.0, {"0/0": (2, [("queued", decided - 0.5), ("committed", decided)])}), {})
    finally:
        broker.close()
    (row,) = map(json.loads, (tmp_path / "spans-broker.jsonl").read_text().splitlines())
    assert (row["begin"], row["seconds"]) == (100.0, 0.5)

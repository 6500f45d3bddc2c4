"""A live broker among peers that send valid messages in an absurd order, or anything in an envelope. Plain nonsense: tests/chaos."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from broker.request_loop import Broker
from broker.source import FileRows, FileSource
from broker.state.rules import Rules
from broker.store import MemoryStore
from slimebus.bus import envelope
from slimebus.bus import messages as m
from slimebus.bus.transport.client import Client

pytestmark = pytest.mark.integration


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    (tmp_path / "p.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(100)))
    rules = Rules(batch_size=4, max_staleness=float("inf"), buffer_capacity=1000, lease_s=600, client_timeout_s=600)
    rows = FileRows([str(tmp_path / "p.jsonl")])
    broker = Broker(rules, FileSource(rows), MemoryStore(), run="r", max_message_bytes=1 << 20)
    stop = threading.Event()
    thread = threading.Thread(target=broker.run, args=(stop,))
    thread.start()
    yield broker
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


def _attack(context: zmq.Context[zmq.Socket[bytes]], address: str, messages: list[list[bytes]]) -> int:
    """Send them through a connection of their own; the number of answers."""
    answers = 0
    with context.socket(zmq.DEALER) as hostile:
        hostile.linger = 0
        hostile.sndhwm = 100_000
        hostile.connect(address)
        for frames in messages:
            hostile.send_multipart(frames)
        while answers < len(messages) and hostile.poll(50):
            envelope.decode(hostile.recv_multipart())
            answers += 1
    return answers


def test_valid_messages_in_an_absurd_order_get_errors_not_a_crash(broker: Broker) -> None:
    chance = random.Random(2)
    people = [Client(broker.endpoint, name=name) for name in ("w", "t")]
    for client, role in zip(people, ("rollout", "trainer"), strict=True):
        client.join(role, timeout_s=60)

    def numbers() -> int:
        return chance.choice([-(2**62), -1, 0, 1, 2, 3, 2**62])

    for i in range(1500):
        chosen: list[m.Message] = [
            m.Resume(
                step=chance.choice([-1, 0, 1, 2, 2**30, 2**62]),
                version=chance.choice([-1, 0, 1, 2**62]),
                lineage=chance.choice(["", "a", "b", str(i)]),
            ),
            m.Publish(lineage=chance.choice(["a", "b"]), version=numbers(), publishers=["x"] * chance.randint(0, 3), digest="d"),
            m.Batch(step=numbers(), wait_s=chance.choice([-1.0, 0.0, float("nan"), 0.01])),
            m.Commit(step=numbers(), checkpoint=numbers(), unused={"a": "b"}),
            m.Fetch(groups=[f"0/{chance.randint(0, 9)}"]),
            m.Finish(),
            m.Lease(
                want=numbers(), wait_s=chance.choice([-1.0, 0.0, float("nan")]), lineage="a", serving=numbers(), needs_weights=bool(i % 2)
            ),
            m.Put(group=f"0/{chance.randint(0, 9)}", lease=numbers(), lineage="a"),
            m.GiveBack(group="0/1", lease=numbers(), outcome=chance.choice(["requeue", "drop", "fail", "?"]), reason=str(i)),
            m.Heartbeat(leases=[numbers()], serving=numbers(), lineage="a"),
            m.Evaluate(key=str(i), datasets=["none"]),
        ]
        chance.choice(people).submit(chance.choice(chosen), timeout_s=0.5)
    time.sleep(0.3)
    people[1].call(m.Resume(step=0, version=0, lineage="last"), timeout_s=60)
    status = people[0].call(m.Status(), timeout_s=60)
    assert msgspec.json.decode(bytes(status.bulk[0]))["run"] == "r"
    assert len(broker.machine.state.meta.moves) <= 256
    assert len(broker.machine.state.waiting_leases) <= broker.machine.state.rules.max_parked
    for client in people:
        client.close()


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4))
FIELDS = sorted({field.name for cls in m.REQUESTS for field in msgspec.structs.fields(cls)})
HEADERS = st.fixed_dictionaries(
    {
        "v": st.just(1) | VALUES,
        "type": st.sampled_from(sorted(m.TYPES)) | st.text(max_size=8),
        "id": st.integers(0, 99) | VALUES,
        "body": st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=8) | VALUES,
    },
    optional={
        "run": st.sampled_from(["r", "", "other"]) | VALUES,
        "sender": st.sampled_from(["evil", ""]) | VALUES,
        "epoch": st.integers(0, 3) | VALUES,
        "future": VALUES,
    },
)


def test_anything_in_an_envelope_is_answered_or_dropped(broker: Broker) -> None:
    worker = Client(broker.endpoint, name="good")
    worker.join("rollout", timeout_s=60)
    with zmq.Context() as context:

        @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
        @given(HEADERS, st.lists(st.binary(max_size=9), max_size=3))
        def strike(header: dict[str, object], bulk: list[bytes]) -> None:
            _attack(context, broker.endpoint, [[msgspec.msgpack.encode(header), *bulk]])
            assert worker.call(m.Lease(want=1, wait_s=0.0, needs_weights=False), timeout_s=20).message

        strike()
    assert broker.server.refused["protocol"] > 0
    worker.close()

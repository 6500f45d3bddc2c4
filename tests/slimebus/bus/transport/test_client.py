"""A real client and a real server over loopback TCP."""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from answering import Answering, polite
from waiting import wait_until

from slimebus.bus import envelope
from slimebus.bus.errors import Fenced, ProtocolError, SlimebusError, Unreachable, UsageError
from slimebus.bus.messages import Error, Goodbye, Heartbeat, HeartbeatReply, Hello, Message, Ok, Put, Set, Status, Welcome
from slimebus.bus.transport.client import MAX_BULK_BYTES, Client
from slimebus.bus.transport.server import Request, Server


@pytest.fixture
def answering(closing: Any) -> Callable[..., Answering]:
    return lambda *how, **options: closing(Answering(*how, **options))


@pytest.fixture
def connect(closing: Any) -> Callable[..., Client]:
    return lambda address, **how: closing(Client(address, name="c1", **how), goodbye=False)


Linked = Callable[..., tuple[Answering, Client]]


@pytest.fixture
def linked(answering: Callable[..., Answering], connect: Callable[..., Client]) -> Linked:
    """A server that answers so, and a client of it."""

    def make(answer: Any = polite, **how: Any) -> tuple[Answering, Client]:
        server = answering(answer)
        return server, connect(server.server.endpoint, **how)

    return make


def test_a_request_and_its_bulk_come_back(linked: Linked) -> None:
    _, client = linked()
    welcome = client.join("rollout", timeout_s=5)
    reply = client.call(Status(), [b"abc", bytes(100_000)], timeout_s=5)
    assert (welcome.epoch, client.epoch, client.run) == (7, 7, "r1")
    assert [len(frame) for frame in reply.bulk] == [3, 100_000]


def test_an_error_reply_raises_with_the_servers_code(linked: Linked) -> None:
    _, client = linked(lambda r: Error(code="wrong_state", text="group 7 is not leased"))
    with pytest.raises(SlimebusError, match="broker: group 7 is not leased") as caught:
        client.call(Status(), timeout_s=5)
    assert caught.value.code == "wrong_state"


@pytest.mark.parametrize("value", ["\udcff", 1 << 80, np.int64(1)])
def test_a_request_that_cannot_be_sent_ends_alone(linked: Linked, value: Any) -> None:
    _, client = linked()
    with pytest.raises(ProtocolError, match="set cannot be sent: "):
        client.call(Set(key="k", settings={"max_staleness": value}), timeout_s=60)
    assert client.call(Status(), timeout_s=60)


def test_an_answer_that_cannot_be_read_ends_its_request_alone(linked: Linked) -> None:
    def of_an_epoch_no_type_allows(request: Request) -> Message:
        return Welcome(epoch=-1, run="r1", heartbeat_s=1) if isinstance(request.message, Hello) else Ok()

    _, client = linked(of_an_epoch_no_type_allows)
    with pytest.raises(ProtocolError, match=r"the answer of broker at .* cannot be read: welcome: .*epoch"):
        client.call(Hello(role="rollout", instance="i"), timeout_s=60)
    assert isinstance(client.call(Status(), timeout_s=60).message, Ok)


def test_a_retryable_error_is_tried_again_until_it_works(linked: Linked) -> None:
    tries: list[int] = []

    def busy_once(request: Request) -> Message:
        tries.append(1)
        return Error(code="disk_full", text="no space", retryable=True) if len(tries) == 1 else Ok()

    _, client = linked(busy_once)
    assert isinstance(client.call(Status(), timeout_s=5).message, Ok)
    assert len(tries) == 2


def test_silence_raises_unreachable_naming_who_and_where(connect: Callable[..., Client]) -> None:
    client = connect("tcp://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"no answer from the broker at tcp://127.0.0.1:9 to 'status' in 0 s"):
        client.call(Status(), timeout_s=0.2)


@pytest.mark.parametrize("resend_s", [0.2, 60.0])
def test_a_request_outlives_a_server_that_restarts(linked: Linked, answering: Callable[..., Answering], resend_s: float) -> None:
    first, client = linked(lambda r: None, resend_s=resend_s)
    future = client.submit(Status(), timeout_s=10)
    wait_until("request", lambda: first.seen)
    first.close()
    answering(polite, bind=first.server.endpoint)
    assert isinstance(future.result(timeout=10).message, Ok)


def test_bulk_is_sent_again_only_on_a_new_connection(linked: Linked, answering: Callable[..., Answering]) -> None:
    first, client = linked(lambda r: None, resend_s=0.1)
    put = client.submit(Put(group="0/1", lease=1, lineage=""), [bytes(1000)], timeout_s=20)
    small = client.submit(Status(), timeout_s=20)
    wait_until("repeats", lambda: sum(isinstance(r.message, Status) for r in first.seen) >= 4)
    assert sum(isinstance(r.message, Put) for r in first.seen) == 1
    first.close()
    second = answering(polite, bind=first.server.endpoint)
    assert isinstance(put.result(timeout=10).message, Ok)
    assert isinstance(small.result(timeout=10).message, Ok)
    assert next(len(r.bulk[0]) for r in second.seen if isinstance(r.message, Put)) == 1000


def test_small_requests_pass_the_bulk_that_waits_for_a_slow_server(linked: Linked) -> None:
    goes_on = threading.Event()
    server, client = linked(lambda r: None if r.bulk and not goes_on.is_set() else Ok(), resend_s=0.1)
    puts = [client.submit(Put(group=f"0/{i}", lease=i, lineage=""), [bytes(MAX_BULK_BYTES // 2)], timeout_s=30) for i in range(6)]
    for _ in range(5):
        assert isinstance(client.call(Status(), timeout_s=5).message, Ok)
    seen = [r for r in server.seen if r.bulk]
    assert len(seen) <= 2, "what one client may have unanswered"
    wait_until("bulk", lambda: sum(bool(r.bulk) for r in server.seen) == 2)
    goes_on.set()
    server.todo += [partial(server.server.reply, request, Ok()) for request in server.seen if request.bulk]  # in the server's thread
    assert [type(put.result(timeout=10).message) for put in puts] == 6 * [Ok]


def test_heartbeats_go_on_while_the_caller_is_busy(linked: Linked) -> None:
    _, client = linked()
    client.join("rollout", timeout_s=5)
    heard = threading.Event()
    client.keep_alive(0.02, lambda: Heartbeat(serving=1), lambda reply: heard.set() if reply.version == 3 else None, lambda problem: None)
    assert heard.wait(5)


def num_beats(server: Answering) -> int:
    return sum(isinstance(request.message, Heartbeat) for request in server.seen)


def test_at_most_one_heartbeat_is_under_way(linked: Linked) -> None:
    server, client = linked(lambda r: None if isinstance(r.message, Heartbeat) else Ok(), resend_s=0.01)
    client.keep_alive(60.0, Heartbeat, lambda reply: None, lambda problem: None)
    wait_until("first heartbeat", lambda: num_beats(server))
    for _ in range(5):
        client.beat_now()
        client.call(Status(), timeout_s=60)
    assert num_beats(server) == 1
    first = next(request for request in server.seen if isinstance(request.message, Heartbeat))
    server.todo.append(partial(server.server.reply, first, HeartbeatReply()))  # in the server's thread
    wait_until("the next, which is due", lambda: num_beats(server) == 2)


def test_a_broker_that_comes_back_finds_one_heartbeat_and_each_request_once(
    answering: Callable[..., Answering], connect: Callable[..., Client]
) -> None:
    gone = answering()
    gone.close()
    client = connect(gone.server.endpoint, resend_s=1.0)
    client.keep_alive(1.0, Heartbeat, lambda reply: None, lambda problem: None)
    asked = client.submit(Status(), timeout_s=60)
    wait_until("two heartbeats and two repeats that are not sent", lambda: client.silent_s > 2.2)
    came_back = answering(lambda r: None if isinstance(r.message, Heartbeat) else Ok(), bind=gone.server.endpoint)
    asked.result(timeout=60)
    assert isinstance(client.call(Hello(role="client", instance="i"), timeout_s=60).message, Ok)
    assert sorted(type(request.message).__name__ for request in came_back.seen) == ["Heartbeat", "Hello", "Status"]


def test_being_fenced_reaches_the_owner(linked: Linked) -> None:
    _, client = linked(lambda r: Error(code="fenced", text="a newer trainer took over"))
    lost: list[SlimebusError] = []
    told = threading.Event()
    client.keep_alive(0.02, Heartbeat, lambda reply: None, lambda problem: (lost.append(problem), told.set())[0])
    assert told.wait(5)
    assert isinstance(lost[0], Fenced)


def test_what_a_fenced_client_waits_for_and_asks_later_fails_at_once(linked: Linked) -> None:
    server, client = linked(lambda r: Error(code="fenced", text="a newer one took over") if isinstance(r.message, Heartbeat) else None)
    waiting = client.submit(Status(), timeout_s=60)
    client.keep_alive(0.02, Heartbeat, lambda reply: None, lambda problem: None)
    with pytest.raises(Fenced):
        waiting.result(5)
    server.close()
    with pytest.raises(Fenced):
        client.call(Status(), timeout_s=60)
    assert sum(isinstance(request.message, Heartbeat) for request in server.seen) == 1


def forgetful() -> Callable[[Request], Message]:
    """Answers of a server that does not know who comes first, and then knows the epoch of the newest hello alone."""
    epochs: list[int] = []

    def answer(request: Request) -> Message:
        if isinstance(request.message, Hello):
            epochs.append(10 * (len(epochs) + 1))
            return Welcome(run="r1", epoch=epochs[-1], heartbeat_s=1.0)
        if len(epochs) == 1 or request.header.epoch != epochs[-1]:
            return Error(code="not_joined", text="who are you?")
        return HeartbeatReply() if isinstance(request.message, Heartbeat) else request.message

    return answer


def test_a_client_that_the_server_forgot_joins_again_and_goes_on(linked: Linked) -> None:
    _, client = linked(forgetful())
    client.rejoins = True
    client.join("rollout", timeout_s=5.0)
    assert isinstance(client.call(Status(), timeout_s=10.0).message, Status)
    assert client.epoch == 20


def test_a_heartbeat_that_is_refused_at_its_deadline_by_a_server_that_forgot_us_ends_nothing(linked: Linked) -> None:
    _, client = linked(forgetful())
    client.rejoins = True
    client.join("rollout", timeout_s=5.0)
    lost: list[SlimebusError] = []
    beaten = threading.Event()
    client.keep_alive(0.02, Heartbeat, lambda reply: beaten.set(), lost.append)
    assert beaten.wait(5)
    assert not lost
    assert client.epoch == 20


def test_closing_says_goodbye(linked: Linked) -> None:
    server, client = linked()
    client.join("rollout", timeout_s=5)
    client.close()
    assert isinstance(server.seen[-1].message, Goodbye)


def test_a_client_that_leaves_does_not_join_again_when_a_heartbeat_follows_its_goodbye(linked: Linked) -> None:
    has_left: list[bool] = []

    def answer(request: Request) -> Message:
        if isinstance(request.message, Hello):
            return Welcome(run="r1", epoch=1, heartbeat_s=1.0)
        if isinstance(request.message, Goodbye):
            has_left.append(True)
            time.sleep(0.2)  # heartbeats are due meanwhile
            return request.message
        return Error(code="not_joined", text="who are you?") if has_left else HeartbeatReply()

    server, client = linked(answer)
    client.rejoins = True
    client.join("rollout", timeout_s=5.0)
    lost: list[SlimebusError] = []
    client.keep_alive(0.02, Heartbeat, lambda reply: None, lost.append)
    client.close()
    assert not lost
    assert sum(isinstance(request.message, Hello) for request in server.seen) == 1


def test_a_port_in_use_is_one_clear_line(answering: Callable[..., Answering]) -> None:
    taken = answering().server.endpoint
    with pytest.raises(UsageError, match=f"address {taken} is in use by another process") as caught:
        Server(taken)
    assert caught.value.code == "address_in_use"


def status(**changes: Any) -> bytes:
    """The header of a request, written without the code under test."""
    return msgpack.packb({"v": 1, "type": "status", "id": 5, "sender": "me", "body": {}} | changes)


@pytest.mark.parametrize(
    ("frame", "code", "id", "says"),
    [
        (b"\xc1garbage", "protocol", 0, ""),
        (b"\x80", "protocol", 0, ""),
        (bytes(70_000), "protocol", 0, ""),
        (status(type="statux"), "unknown_type", 5, "statux"),
        (status(type="hello"), "protocol", 5, ""),
        (status(v=9), "protocol_version", 5, "run the same slimebus release everywhere"),
        (status(id=-1), "protocol", -1, "id -1; expected 0 to 2^63-1"),
        (status(id=2**63), "protocol", 2**63, "expected 0 to 2^63-1"),
        (status(sender=""), "protocol", 5, "has 0 bytes in UTF-8; expected 1 to 128"),
        (status(sender="x" * 129), "protocol", 5, "has 129 bytes in UTF-8"),
        (status(sender="\U0001f600" * 33), "protocol", 5, "has 132 bytes in UTF-8"),
    ],
)
def test_what_cannot_be_read_is_answered_with_an_error_and_ends_nothing(
    answering: Callable[..., Answering], frame: bytes, code: str, id: int, says: str
) -> None:
    server = answering()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.server.endpoint)
        socket.send(frame)
        assert socket.poll(5000)
        got = envelope.decode(socket.recv_multipart())
        assert isinstance(got.message, Error)
        assert (got.header.id, got.message.code, says in got.message.text) == (id, code, True)
        socket.send(status(id=6))
        assert socket.poll(5000)
        assert isinstance(envelope.decode(socket.recv_multipart()).message, Ok)
    assert server.server.refused[code] == 1


@pytest.mark.parametrize(("identity", "name"), [(b"w1/ab12", "client w1/ab12"), (b"", "a client without a name (00")])
def test_a_refusal_names_the_client_and_its_address_in_the_log(
    answering: Callable[..., Answering], caplog: pytest.LogCaptureFixture, identity: bytes, name: str
) -> None:
    server = answering()
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        if identity:
            dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(server.server.endpoint)
        dealer.send(b"nonsense")
        assert dealer.poll(5000)
    assert f"message from {name}" in caplog.text
    assert " at 127.0.0.1 refused: header does not parse" in caplog.text


def test_a_name_that_no_server_would_take_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="has 132 bytes in UTF-8; expected 1 to 128; choose a shorter name"):
        Client("tcp://127.0.0.1:1", name="\U0001f600" * 33)


def test_closing_frees_whoever_waits_for_an_answer_now_or_later() -> None:
    client = Client("tcp://127.0.0.1:1", name="c")
    waiting = client.submit(Status(), timeout_s=600)
    client.close()
    assert waiting.cancelled()
    assert client.submit(Status(), timeout_s=600).cancelled()


class SlowOutbox(queue.SimpleQueue[Any]):
    """Puts once the client's thread has ended, or a tenth of a second later if it does not end before that."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.is_waiting.set()
        self.thread.join(0.1)
        super().put(item)


def test_a_request_made_while_its_client_is_closed_ends() -> None:
    client = Client("tcp://127.0.0.1:1", name="w")  # nobody answers: a server might, before the client is closed
    outbox = SlowOutbox()
    outbox.thread, outbox.is_waiting = client._thread, threading.Event()
    client._outbox = outbox
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(client.submit, Status())
        outbox.is_waiting.wait(10)
        client.close(goodbye=False)
        with pytest.raises(CancelledError):
            asked.result(10).result(5)


@pytest.mark.parametrize("address", ["nonsense", "http://h:1", "tcp://host", "tcp://:1", "tcp://h:x"])
def test_what_is_no_address_is_refused_at_once(address: str) -> None:
    with pytest.raises(UsageError, match=r"is no address of a broker; expected tcp://HOST:PORT"):
        Client(address, name="c1")


def test_a_server_that_vanishes_is_logged_within_seconds_and_again_when_it_answers(
    linked: Linked, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slimebus.bus.transport.request.SILENT_S", 0.5)
    is_away = threading.Event()
    _, client = linked(lambda request: None if is_away.is_set() else polite(request))
    client.join("trainer", timeout_s=5)
    client.keep_alive(0.1, Heartbeat, lambda reply: None, lambda problem: None)

    is_away.set()
    wait_until("two lines of a growing silence", lambda: len(caplog.records) == 2)
    is_away.clear()
    wait_until("the line that it answers", lambda: len(caplog.records) == 3)
    first, second, last = [record.message for record in caplog.records]
    assert "has not answered for" in first
    assert "has not answered for" in second
    assert "answers again, after" in last

"""A real client and a real server over loopback TCP."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import msgpack
import pytest
import zmq
from answering import Answering, polite
from waiting import wait_until

from slimebus import envelope
from slimebus.errors import Fenced, SlimebusError, Unreachable, UsageError
from slimebus.messages import Error, Goodbye, Heartbeat, Hello, Message, Ok, Status, Welcome
from slimebus.transport.client import Client
from slimebus.transport.server import Request, Server


@pytest.fixture
def answering(closing: Any) -> Callable[..., Answering]:
    return lambda *how, **options: closing(Answering(*how, **options))


@pytest.fixture
def connect(closing: Any) -> Callable[..., Client]:
    return lambda address, **how: closing(Client(address, name="c1", **how), goodbye=False)


def test_a_request_and_its_bulk_come_back(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    server = answering()
    client = connect(server.server.endpoint)
    welcome = client.join("rollout", timeout_s=5)
    reply = client.call(Status(), [b"abc", bytes(100_000)], timeout_s=5)
    assert (welcome.epoch, client.epoch, client.run) == (7, 7, "r1")
    assert [len(frame) for frame in reply.bulk] == [3, 100_000]


def test_an_error_reply_raises_with_the_servers_code(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    client = connect(answering(lambda r: Error(code="wrong_state", text="group 7 is not leased")).server.endpoint)
    with pytest.raises(SlimebusError, match="broker: group 7 is not leased") as caught:
        client.call(Status(), timeout_s=5)
    assert caught.value.code == "wrong_state"


def test_a_retryable_error_is_tried_again_until_it_works(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    tries: list[int] = []

    def busy_once(request: Request) -> Message:
        tries.append(1)
        return Error(code="disk_full", text="no space", retryable=True) if len(tries) == 1 else Ok()

    client = connect(answering(busy_once).server.endpoint)
    assert isinstance(client.call(Status(), timeout_s=5).message, Ok)
    assert len(tries) == 2


def test_silence_raises_unreachable_naming_who_and_where(connect: Callable[..., Client]) -> None:
    client = connect("tcp://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"no answer from the broker at tcp://127.0.0.1:9 to 'status' in 0 s"):
        client.call(Status(), timeout_s=0.2)


def test_a_request_outlives_a_server_that_restarts(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    first = answering(lambda r: None)
    address = first.server.endpoint
    client = connect(address, resend_s=0.2)
    future = client.submit(Status(), timeout_s=10)
    wait_until("request", lambda: first.seen)
    first.close()
    answering(polite, bind=address)
    assert isinstance(future.result(timeout=10).message, Ok)


def test_heartbeats_go_on_while_the_caller_is_busy(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    server = answering()
    client = connect(server.server.endpoint)
    client.join("rollout", timeout_s=5)
    heard = threading.Event()
    client.keep_alive(0.02, lambda: Heartbeat(serving=1), lambda reply: heard.set() if reply.version == 3 else None, lambda problem: None)
    assert heard.wait(5)


def test_being_fenced_reaches_the_owner(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    client = connect(answering(lambda r: Error(code="fenced", text="a newer trainer took over")).server.endpoint)
    lost: list[SlimebusError] = []
    told = threading.Event()
    client.keep_alive(0.02, Heartbeat, lambda reply: None, lambda problem: (lost.append(problem), told.set())[0])
    assert told.wait(5)
    assert isinstance(lost[0], Fenced)


def test_a_client_that_the_server_forgot_joins_again_and_goes_on(
    answering: Callable[..., Answering], connect: Callable[..., Client]
) -> None:
    epochs: list[int] = []

    def forgetful(request: Request) -> Message:
        if isinstance(request.message, Hello):
            epochs.append(10 * (len(epochs) + 1))
            return Welcome(run="r1", epoch=epochs[-1], heartbeat_s=1.0)
        if len(epochs) == 1 or request.header.epoch != epochs[-1]:
            return Error(code="not_joined", text="who are you?")
        return request.message

    client = connect(answering(forgetful).server.endpoint)
    client.rejoins = True
    client.join("rollout", timeout_s=5.0)
    assert isinstance(client.call(Status(), timeout_s=10.0).message, Status)
    assert client.epoch == 20


def test_closing_says_goodbye(answering: Callable[..., Answering], connect: Callable[..., Client]) -> None:
    server = answering()
    client = connect(server.server.endpoint)
    client.join("rollout", timeout_s=5)
    client.close()
    assert isinstance(server.seen[-1].message, Goodbye)


def test_a_port_in_use_is_one_clear_line(answering: Callable[..., Answering]) -> None:
    taken = answering().server.endpoint
    with pytest.raises(UsageError, match=f"address {taken} is in use by another process") as caught:
        Server(taken)
    assert caught.value.code == "address_in_use"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        ([b"\xc1garbage"], "protocol"),
        ([b"\x80"], "protocol"),
        ([bytes(70_000)], "protocol"),
        ([envelope.encode(Status(), id=5).replace(b"status", b"statux")], "unknown_type"),
        ([envelope.encode(Status(), id=5).replace(b"\xa6status", b"\xa5hello")], "protocol"),
    ],
)
def test_garbage_is_answered_with_an_error_and_ends_nothing(answering: Callable[..., Answering], frames: list[bytes], code: str) -> None:
    server = answering()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.server.endpoint)
        socket.send_multipart(frames)
        assert socket.poll(5000)
        reply = envelope.decode(socket.recv_multipart()).message
        assert isinstance(reply, Error)
        assert reply.code == code
        socket.send_multipart([envelope.encode(Status(), id=6)])
        assert socket.poll(5000)
        assert isinstance(envelope.decode(socket.recv_multipart()).message, Ok)
    assert server.server.refused[code] == 1


def test_another_protocol_version_is_refused_with_the_remedy(answering: Callable[..., Answering]) -> None:
    server = answering()
    old = msgpack.packb({"v": 9, "type": "status", "id": 5, "body": {}})
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.server.endpoint)
        socket.send_multipart([old])
        assert socket.poll(5000)
        reply = envelope.decode(socket.recv_multipart()).message
    assert isinstance(reply, Error)
    assert (reply.code, "run the same slimebus release everywhere" in reply.text) == ("protocol_version", True)


def test_closing_frees_whoever_waits_for_an_answer_now_or_later() -> None:
    client = Client("tcp://127.0.0.1:1", name="c")
    waiting = client.submit(Status(), timeout_s=600)
    client.close()
    assert waiting.cancelled()
    assert client.submit(Status(), timeout_s=600).cancelled()


class SlowOutbox(queue.SimpleQueue[Any]):
    """Puts once the client's thread has ended, or half a second later if it does not end before that."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self.is_waiting.set()
        self.thread.join(0.5)
        super().put(item)


def test_a_request_made_while_its_client_is_closed_ends(answering: Callable[..., Answering]) -> None:
    client = Client(answering().server.endpoint, name="w")
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

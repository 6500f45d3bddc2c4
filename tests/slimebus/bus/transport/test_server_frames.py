"""Frames of a request and of its reply arrive whole, whatever their size."""

from collections.abc import Iterator

import pytest
import zmq
from waiting import wait_until

from slimebus.bus import envelope
from slimebus.bus.messages import Ok, Status
from slimebus.bus.transport.server import ZERO_COPY_BYTES, Limits, Server

SIZES = [0, 1, 255, ZERO_COPY_BYTES - 1, ZERO_COPY_BYTES, 300_000]


@pytest.fixture
def server() -> Iterator[Server]:
    opened = Server("tcp://127.0.0.1:0")
    yield opened
    opened.close()


@pytest.fixture
def dealer(server: Server) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(server.endpoint)
        yield socket


def test_frames_of_every_size_come_as_they_were_sent_and_stay_so(server: Server, dealer: zmq.Socket[bytes]) -> None:
    sent = [[bytes([i + j & 255]) * size for j, size in enumerate(SIZES)] for i in range(20)]
    for bulk in sent:
        dealer.send_multipart([envelope.encode(Status(), id=1, sender="me"), *bulk])
    requests = []
    while len(requests) < len(sent):
        got = server.receive(5.0)
        assert got, "a message was lost"
        requests += got
    assert [[bytes(frame) for frame in request.bulk] for request in requests] == sent


def test_a_reply_of_large_and_small_frames_arrives_whole(server: Server, dealer: zmq.Socket[bytes]) -> None:
    dealer.send(envelope.encode(Status(), id=7, sender="me"))
    [request] = server.receive(5.0)
    bulk = [bytes([size & 255]) * size for size in SIZES]
    server.reply(request, Ok(), [memoryview(frame) for frame in bulk])
    assert dealer.poll(5000)
    header, *frames = dealer.recv_multipart()
    assert envelope.decode([header]).header.id == 7
    assert frames == bulk


def test_a_burst_ends_when_it_is_large(server: Server, dealer: zmq.Socket[bytes]) -> None:
    bulk = bytes(Limits().burst_bytes // 4 + 1)
    for number in range(9):
        dealer.send_multipart([envelope.encode(Status(), id=number, sender="me"), bulk])
    sizes = []
    while sum(sizes) < 9:
        sizes.append(len(server.receive(5.0)))
        assert sizes[-1], "a message was lost"
        assert sizes[-1] < 4 or not server.is_drained, "it was cut: others may lie behind it"
    assert max(sizes) <= 4
    assert server.receive(0.0) == []
    assert server.is_drained


def test_a_burst_that_collects_waits_once_for_what_comes_behind_its_first_request(
    server: Server, dealer: zmq.Socket[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("slimebus.bus.transport.server.time.sleep", pauses.append)
    assert server.receive(0.0, collect_s=0.25) == []
    assert pauses == [], "nothing came, so there is nothing to collect for"
    dealer.send(envelope.encode(Status(), id=1, sender="me"))
    assert [request.header.id for request in server.receive(5.0, collect_s=0.25)] == [1]
    assert pauses == [0.25]


def test_a_server_that_does_not_read_takes_in_four_messages_of_a_connection_and_tcp_makes_its_sender_wait(server: Server) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.sndhwm, dealer.linger = 1, 0
        dealer.connect(server.endpoint)
        taken = 0
        while taken < 32 and dealer.poll(1000, zmq.POLLOUT):
            dealer.send(bytes(4 << 20), zmq.NOBLOCK)
            taken += 1
    assert 4 <= taken <= 12, "four that wait to be read, one on its way, and what the sockets of both ends hold"


def test_the_server_knows_at_once_whose_connection_is_gone(server: Server) -> None:
    peers = []
    with zmq.Context() as context:
        for identity in (b"w/1", b"w/2"):
            socket = context.socket(zmq.DEALER)
            socket.identity, socket.linger = identity, 0
            socket.connect(server.endpoint)
            socket.send(envelope.encode(Status(), id=1, sender="w"))
            peers.append(socket)
            assert server.receive(5.0)
        first, second = peers
        first.close()
        wait_until("the closed connection to be noticed", lambda: not server.is_connected(b"w/1"), 5.0)
        assert server.is_connected(b"w/2")
        assert not server.is_connected(b"nobody")
        assert not server.refused, "nobody was refused anything"
        second.send(envelope.encode(Status(), id=2, sender="w"))
        [request] = server.receive(5.0)
        server.reply(request, Ok())
        headers = [envelope.decode([second.recv()]).header.id for _ in range(2)]
        assert headers == [0, 2], "the question answers no request"
        second.close()

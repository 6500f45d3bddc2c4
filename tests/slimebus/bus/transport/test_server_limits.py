"""How many clients a server takes, as far as the system lets it."""

import resource
from collections.abc import Iterator

import pytest
import zmq

from slimebus.bus import envelope
from slimebus.bus.errors import UsageError
from slimebus.bus.messages import Status
from slimebus.bus.transport.server import Limits, Server

CLIENTS = 80


@pytest.fixture
def hard_limit() -> Iterator[int]:
    """The system's; the soft one is far below it until the test ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (CLIENTS, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_clients_come_than_the_soft_limit_of_open_files_lets_in(hard_limit: int) -> None:
    server = Server("tcp://127.0.0.1:0")
    heard: set[bytes] = set()
    with zmq.Context() as context:
        sockets = [context.socket(zmq.DEALER) for _ in range(CLIENTS)]
        for socket in sockets:
            socket.linger = 0
            socket.connect(server.endpoint)
            socket.send(envelope.encode(Status(), id=1, sender="me"))
        while requests := server.receive(5.0):
            heard |= {request.peer for request in requests}
            if len(heard) == CLIENTS:
                break
        for socket in sockets:
            socket.close()
    server.close()
    assert len(heard) == CLIENTS


def test_a_server_that_may_not_open_a_file_for_each_connection_is_refused_with_the_way_out(hard_limit: int) -> None:
    with pytest.raises(UsageError, match=rf"this system allows a process {hard_limit} .*; raise that, or lower broker.max_clients"):
        Server("tcp://127.0.0.1:0", limits=Limits(max_connections=hard_limit))


def test_thousands_of_handshakes_at_once_have_a_place_to_wait_and_several_threads() -> None:
    server = Server("tcp://127.0.0.1:0")
    assert server.socket.backlog == 4096
    assert server.context.get(zmq.IO_THREADS) == 4
    server.close()

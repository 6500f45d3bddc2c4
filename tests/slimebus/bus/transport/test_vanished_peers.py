"""Peers that are gone or read nothing: they neither end the server nor fill its memory."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from waiting import wait_until

from slimebus.bus import envelope
from slimebus.bus.messages import Ok, Status
from slimebus.bus.transport import curve
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.curve import DEAD_S
from slimebus.bus.transport.server import MAX_REPLIES, Limits, Server

RESET = """
import socket, struct, sys, time
from slimebus.bus.transport.server import Server
from hostile_peer import RawTcp

server = Server("tcp://127.0.0.1:0")
peer = socket.create_connection(("127.0.0.1", int(server.endpoint.rpartition(":")[2])))
peer.sendall(RawTcp.GREETING + RawTcp.READY)
greeting, (_, size) = peer.recv(64, socket.MSG_WAITALL), peer.recv(2, socket.MSG_WAITALL)
peer.recv(size, socket.MSG_WAITALL)  # READY
peer.sendall(100 * b"\\x00\\x01x")  # messages of one byte: more than are read ahead
assert server.wait(60)
time.sleep(0.5)
peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
peer.close()
time.sleep(5.5)  # libzmq's heartbeats, where they are on, come each 5 s
until = time.monotonic() + 10
while server.refused["protocol"] <= 4 and time.monotonic() < until:
    server.receive(0.1)
print("read", server.refused["protocol"])
"""
HERE = Path(__file__).parents[4]


def test_a_connection_that_is_reset_with_its_requests_unread_does_not_end_the_server() -> None:
    paths = {"PYTHONPATH": f"{HERE}:{HERE / 'tests' / 'chaos'}"}
    done = subprocess.run([sys.executable, "-c", RESET], env=paths, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) > 4, "what had arrived was looked at"


def test_both_sides_have_the_kernel_probe_a_connection_that_says_nothing(closing: Any) -> None:
    server = closing(Server("tcp://127.0.0.1:0"))
    closing(Client(server.endpoint, name="c"))
    wait_until("a connection", lambda: server.authenticator.num_connections)
    ends = [
        c
        for c in psutil.Process().net_connections()
        if c.raddr and server.endpoint.rpartition(":")[2] in (str(c.laddr.port), str(c.raddr.port))
    ]
    assert len(ends) == 2
    for end in ends:
        with socket.socket(fileno=os.dup(end.fd)) as one:
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == DEAD_S // 2


def test_a_connection_that_takes_none_of_what_waits_for_it_is_closed_and_its_memory_free(
    closing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "DEAD_S", 4)
    server = closing(Server("tcp://127.0.0.1:0"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger, deaf.rcvhwm, deaf.rcvbuf, deaf.reconnect_ivl = 0, 1, 4096, -1
        deaf.connect(server.endpoint)
        deaf.send(envelope.encode(Status(), id=1, sender="deaf"))
        [request] = server.receive(20.0)
        for _ in range(8):
            server.reply(request, Ok(), [bytes(4 << 20)])
        assert server.has_unread(request.peer)
        wait_until("end of the connection", lambda: not server.authenticator.num_connections, timeout_s=60)
        wait_until("freed replies", lambda: not server.receive(0.01) and not server.unsent.total_bytes)


def test_small_replies_to_one_that_reads_none_are_bounded_by_their_bytes(closing: Any) -> None:
    server = closing(Server("tcp://127.0.0.1:0", limits=Limits(unsent_bytes=4 << 20)))
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger, deaf.rcvhwm, deaf.rcvbuf = 0, 1, 4096
        deaf.connect(server.endpoint)
        deaf.send(envelope.encode(Status(), id=1, sender="deaf"))
        [request] = server.receive(20.0)
        for _ in range(MAX_REPLIES - 100):
            server.reply(request, Ok(), [bytes(30_000)])
            time.sleep(0.0005)  # as many as the kernel takes are gone at once
        assert server.unsent.total_bytes < 5 << 20
        assert server.refused["unsent_mib"] > 0

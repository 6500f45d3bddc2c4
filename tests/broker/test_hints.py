"""Hints over real sockets: who comes late hears the last one again."""

import contextlib
import time
from typing import Any

import zmq

from broker.hints import HintPublisher
from slimebus.bus import envelope
from slimebus.bus.messages import Hint
from slimebus.bus.transport.server import Server


def test_each_new_subscriber_hears_the_last_hint_again(closing: Any) -> None:
    server = closing(Server("tcp://127.0.0.1:0"))
    hints = HintPublisher(server, "tcp://127.0.0.1:0")
    hints.publish(last := Hint(lineage="L", version=3))
    with contextlib.closing(hints), zmq.Context() as context, contextlib.ExitStack() as subscribers:
        for _ in range(3):
            late = subscribers.enter_context(context.socket(zmq.SUB))
            late.linger = 0
            late.subscribe(b"")
            late.connect(hints.endpoint)
            deadline = time.monotonic() + 20
            while not late.poll(10):
                assert time.monotonic() < deadline, "no hint"
                hints.greet_subscribers()
            assert envelope.decode(late.recv_multipart()).message == last

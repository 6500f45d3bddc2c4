"""A flood that nobody reads the answers of: `python deaf_flood.py ADDRESS SECONDS`.

20 connections ask for the status 20 times each 50 ms; then the process vanishes, with their answers unread. Prints one JSON line: how
many requests were sent.
"""

import itertools
import json
import os
import sys
import time
from typing import NoReturn

import zmq

from slimebus.bus import envelope
from slimebus.bus.messages import Status

CONNECTIONS, REQUESTS, EVERY_S = 20, 20, 0.05


def flood(address: str, seconds: float) -> NoReturn:
    """Send for so long, print how many requests the sockets took, and vanish."""
    context, sent = zmq.Context(), 0
    frames = itertools.cycle([envelope.encode(Status(), id=i, sender="deaf") for i in range(1000)])
    sockets = [context.socket(zmq.DEALER) for _ in range(CONNECTIONS)]
    for socket in sockets:
        socket.rcvhwm = 1
        socket.connect(address)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for socket in sockets * REQUESTS:
            try:
                socket.send(next(frames), zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                continue
        time.sleep(EVERY_S)
    print(json.dumps({"sent": {"status": sent}, "answers": 0}), flush=True)
    os._exit(0)  # from here, where no socket is closed in order: the system resets connections that hold unread answers


if __name__ == "__main__":
    os.nice(19)  # as hostile_peer.py
    flood(sys.argv[1], float(sys.argv[2]))

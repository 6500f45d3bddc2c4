"""How the launchers of a trainer's nodes act as one: they start their ranks together, and end them together.

    node k -> node 0    {"node": k, "ranks": 4, "nnodes": 2}      once, when it is there; with "problem" it cannot start
    node 0 -> all       {"start": PORT}                           start your ranks; rank 0's store listens at PORT
    node k -> node 0    {"ended": CODE, "failure": "..."}         its ranks have ended: code 0, or that of the first that failed, and
                                                                  which one that was; once for each "start"
    node k -> node 0    {"leave": true}                           it got SIGTERM or Ctrl-C: let all save a checkpoint and leave
    node 0 -> all       {"stop": "..."}                           end your ranks: the first failure on any node
    node 0 -> all       {"finish": CODE}                          leave with this exit code; with "problem" nothing was started

A line of JSON each, over TCP. A connection that breaks is a node that is gone.
"""

import contextlib
import json
import logging
import select
import socket
import time
from collections.abc import Collection, Iterator
from typing import Any

from slimebus.bus.errors import SlimebusError, UsageError
from trainer.launch.plan import Plan

log = logging.getLogger("trainer")

RENDEZVOUS_S = 600.0
"""How long nodes wait for one another: as a cluster's nodes may start minutes apart."""
RETRY_S = 0.5
TELL_S = 60.0
"""How long a node that cannot start waits to say so: the nodes of one job come together."""
GONE = {"gone": True}


class NodeConnection:
    """A connection that carries a JSON object a line. node: which one is at the other end."""

    def __init__(self, connection: socket.socket, address: tuple[str, int]) -> None:
        self.connection, self.address, self.node, self._buffer = connection, address[0], 0, b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, **message: Any) -> None:
        """Never raises: `receive` finds a node gone that it no longer reaches."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """The messages that come within the time, as soon as there is one; {"gone": true} when there will be no more."""
        if not select.select([self.connection], [], [], timeout_s)[0]:
            return
        try:
            read = self.connection.recv(65536)
        except OSError:
            read = b""
        self._buffer += read
        *lines, self._buffer = self._buffer.split(b"\n")
        yield from map(json.loads, lines)
        if not read:
            yield GONE

    def receive_one(self, timeout_s: float) -> dict[str, Any]:
        """The next message, however many reads it takes; {"gone": true} when none comes in time."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            for message in self.receive(left_s):
                return message
        return GONE

    def close(self) -> None:
        self.connection.close()


def rendezvous(plan: Plan) -> list[NodeConnection]:
    """Node 0: a connection from each other node, in order. Another node: the one to node 0.

    Raises SlimebusError when a node does not come within ten minutes, UsageError when it was started differently or has a problem. Node 0
    tells the others what it raises.
    """
    deadline = time.monotonic() + RENDEZVOUS_S
    if plan.node_rank:
        peer = _connect(plan, deadline)
        peer.send(**_hello(plan))
        return [peer]
    log.info("node 0 of %d: waiting for the others at port %d", plan.nnodes, plan.master_port)
    with socket.create_server(("", plan.master_port)) as server:
        peers: list[NodeConnection] = []
        try:
            while len(peers) < plan.nnodes - 1:
                server.settimeout(max(0.1, deadline - time.monotonic()))
                found = {0, *(peer.node for peer in peers)}
                peers.append(_accept(plan, server, found))
                _check(plan, peers[-1], found)
        except BaseException as bad:
            for peer in peers:
                _refuse(peer, bad)
            raise
    return sorted(peers, key=lambda peer: peer.node)


def tell_others(plan: Plan, problem: str) -> None:
    """Tell the other nodes, which would wait for this one, why it cannot start: node 0 all that come within TELL_S, another node 0."""
    log.error("%s; the other nodes are told, for %.0f s at most", problem, TELL_S)
    deadline = time.monotonic() + TELL_S
    if plan.node_rank:
        with contextlib.suppress(SlimebusError), contextlib.closing(_connect(plan, deadline)) as peer:
            peer.send(problem=problem, node=plan.node_rank)
        return
    with socket.create_server(("", plan.master_port)) as server, contextlib.suppress(TimeoutError):
        for _ in range(plan.nnodes - 1):
            server.settimeout(max(0.1, deadline - time.monotonic()))
            peer = NodeConnection(*server.accept())
            peer.receive_one(RETRY_S)  # what it says of itself: a connection with unread data would be reset
            _refuse(peer, UsageError(f"node 0: {problem}"))


def _hello(plan: Plan) -> dict[str, int]:
    return {"node": plan.node_rank, "ranks": plan.ranks_here, "nnodes": plan.nnodes}


def _refuse(peer: NodeConnection, bad: BaseException) -> None:
    peer.send(finish=2 if isinstance(bad, UsageError) else 1, problem=bad.text if isinstance(bad, SlimebusError) else "node 0 was stopped")
    peer.close()


def _accept(plan: Plan, server: socket.socket, found: Collection[int]) -> NodeConnection:
    try:
        return NodeConnection(*server.accept())
    except TimeoutError:
        missing = ", ".join(str(node) for node in range(plan.nnodes) if node not in found)
        late = f"node {missing} did not come within {RENDEZVOUS_S:.0f} s"
        raise SlimebusError(f"{late}; was it started, with this node as --master-addr?") from None


def _check(plan: Plan, peer: NodeConnection, found: Collection[int]) -> None:
    """Raise UsageError unless the node that has come fits."""
    said = peer.receive_one(RENDEZVOUS_S)
    peer.node = int(said.get("node", -1))
    if "problem" in said:
        raise UsageError(f"node {peer.node} ({peer.address}): {said['problem']}")
    if said != {**_hello(plan), "node": peer.node} or peer.node in found:
        twice = f"node {peer.node} is there twice" if peer.node in found else f"it says {said}, node 0 {_hello(plan)}"
        remedy = "give every node the same --nnodes and --nproc-per-node, and a --node-rank of its own"
        raise UsageError(f"a node at {peer.address} does not fit: {twice}; {remedy}")


def _connect(plan: Plan, deadline: float) -> NodeConnection:
    address = (plan.master_addr, plan.master_port)
    log.info("node %d of %d, to meet node 0 at %s:%d", plan.node_rank, plan.nnodes, *address)
    while True:
        try:
            return NodeConnection(socket.create_connection(address, timeout=10.0), address)
        except OSError as bad:
            if time.monotonic() > deadline:
                raise SlimebusError(f"node 0 does not answer at {plan.master_addr}:{plan.master_port}: {bad}") from None
            time.sleep(RETRY_S)

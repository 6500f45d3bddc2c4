"""Starts the ranks of one node, ends them together, and with the launchers of the other nodes starts all of them again.

    rendezvous -> [start -> watch -> (a rank failed anywhere) -> stop everywhere -> start again] -> finish

A set of ranks that starts again goes on from the newest checkpoint, as any trainer does. Launchers send each other a line of JSON a
message, over TCP; a connection that breaks is a node that is gone.

    node k -> node 0    {"node": k, "ranks": 4, "nnodes": 2}      once, when it is there; with "problem" it cannot start
    node 0 -> all       {"start": PORT}                           start your ranks; rank 0's store listens at PORT
    node k -> node 0    {"ended": CODE, "failure": "..."}         its ranks have ended: code 0, or that of the first that failed, and
                                                                  which one that was; once for each "start"
    node k -> node 0    {"leave": true}                           it got SIGTERM or Ctrl-C: let all save a checkpoint and leave
    node 0 -> all       {"stop": "..."}                           end your ranks: the first failure on any node
    node 0 -> all       {"finish": CODE}                          leave with this exit code; with "problem" nothing was started
"""

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import IO, Any, NamedTuple

from slimebus.bus.errors import EXIT_FAILURE, EXIT_USAGE, SlimebusError, UsageError
from slimebus.process.launch import SLIMEBUS, ChildProcess, free_port
from trainer.launch.plan import LAUNCHED, LaunchPlan

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


def rendezvous(plan: LaunchPlan) -> list[NodeConnection]:
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
                _check_node(plan, peers[-1], found)
        except BaseException as bad:
            for peer in peers:
                _refuse(peer, bad)
            raise
    return sorted(peers, key=lambda peer: peer.node)


def tell_others(plan: LaunchPlan, problem: str) -> None:
    """Tell the other nodes, which would wait for this one, why it cannot start: node 0 all that come within TELL_S, another node 0."""
    log.error("%s; telling the other nodes, for %.0f s at most", problem, TELL_S)
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


def _hello(plan: LaunchPlan) -> dict[str, int]:
    return {"node": plan.node_rank, "ranks": plan.ranks_here, "nnodes": plan.nnodes}


def _refuse(peer: NodeConnection, bad: BaseException) -> None:
    peer.send(finish=2 if isinstance(bad, UsageError) else 1, problem=bad.text if isinstance(bad, SlimebusError) else "node 0 was stopped")
    peer.close()


def _accept(plan: LaunchPlan, server: socket.socket, found: Collection[int]) -> NodeConnection:
    try:
        return NodeConnection(*server.accept())
    except TimeoutError:
        missing = ", ".join(str(node) for node in range(plan.nnodes) if node not in found)
        late = f"node {missing} did not come within {RENDEZVOUS_S:.0f} s"
        raise SlimebusError(f"{late}; was it started, with this node as --master-addr?") from None


def _check_node(plan: LaunchPlan, peer: NodeConnection, found: Collection[int]) -> None:
    """Raise UsageError unless the node that has come fits."""
    said = peer.receive_one(RENDEZVOUS_S)
    peer.node = int(said.get("node", -1))
    if "problem" in said:
        raise UsageError(f"node {peer.node} ({peer.address}): {said['problem']}")
    if said != {**_hello(plan), "node": peer.node} or peer.node in found:
        twice = f"node {peer.node} is there twice" if peer.node in found else f"it says {said}, node 0 {_hello(plan)}"
        remedy = "give every node the same --nnodes and --nproc-per-node, and a --node-rank of its own"
        raise UsageError(f"a node at {peer.address} does not fit: {twice}; {remedy}")


def _connect(plan: LaunchPlan, deadline: float) -> NodeConnection:
    address = (plan.master_addr, plan.master_port)
    log.info("node %d of %d, to meet node 0 at %s:%d", plan.node_rank, plan.nnodes, *address)
    while True:
        try:
            return NodeConnection(socket.create_connection(address, timeout=10.0), address)
        except OSError as bad:
            if time.monotonic() > deadline:
                raise SlimebusError(f"node 0 does not answer at {plan.master_addr}:{plan.master_port}: {bad}") from None
            time.sleep(RETRY_S)


POLL_S = 0.1
GONE_CODE = 70
"""Of a node without its launcher: without it nothing can start again. It becomes the exit code."""
FINAL_CODES = (0, EXIT_USAGE, GONE_CODE)
"""Exit codes after which starting again makes no sense."""
MAX_ERROR_BYTES = 2000
FAILED = "a rank failed, so all are ended: %s"


class End(NamedTuple):
    """How the ranks of a node have ended. code: 0, or that of the first that failed; failure: which one that was, and its error."""

    code: int = 0
    failure: str = ""


class Ranks:
    """The processes of this node's ranks. errors: a file for each, where it writes its error before it ends."""

    def __init__(self, plan: LaunchPlan, arguments: Sequence[str], port: int) -> None:
        self.first_rank = plan.node_rank * plan.ranks_here
        self.errors = [tempfile.TemporaryFile() for _ in range(plan.ranks_here)]  # noqa: SIM115  # stop() closes them
        self.processes = [_start(plan, arguments, port, local, error) for local, error in enumerate(self.errors)]
        self._end: End | None = None

    def end(self) -> End | None:
        """None while they run. The code of one that a signal has ended is 1."""
        self._end = self._end or self._find_end()
        return self._end

    def _find_end(self) -> End | None:
        codes = [process.poll() for process in self.processes]
        for local, code in enumerate(codes):
            if code:
                error = os.pread(self.errors[local].fileno(), MAX_ERROR_BYTES, 0).decode(errors="replace")
                ended = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                which = f"rank {self.first_rank + local} on {socket.gethostname()} ended with {ended}"
                return End(max(code, EXIT_FAILURE), f"{which}: {error}" if error else which)
        return None if None in codes else End()

    def send(self, number: int) -> None:
        """The signal to each that still runs."""
        for process in self.processes:
            process.send_signal(number)

    def stop(self) -> None:
        """End those that still run, at once: what they have trained since the newest checkpoint is lost, as by any death of a rank."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.end()
        for error in self.errors:
            error.close()


def _start(plan: LaunchPlan, arguments: Sequence[str], port: int, local: int, error: IO[bytes]) -> "subprocess.Popen[bytes]":
    environment = {
        "PYTHONUNBUFFERED": "1",
        "RANK": str(plan.node_rank * plan.ranks_here + local),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.ranks_here),
        "GROUP_RANK": str(plan.node_rank),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        LAUNCHED: str(error.fileno()),
    }
    command, fds = [*SLIMEBUS, *arguments], [error.fileno()]
    return ChildProcess(command, environment=environment, stdin=None, pass_fds=fds, on_parent_end=signal.SIGKILL).process


class Launcher:
    """The launcher of one node. `run` returns the exit code of the whole trainer."""

    def __init__(self, plan: LaunchPlan, arguments: Sequence[str], max_restarts: int) -> None:
        self.plan, self.arguments, self.max_restarts = plan, arguments, max_restarts
        self.peers: list[NodeConnection] = []
        self.ranks: Ranks | None = None
        self.is_stopping = False

    def run(self) -> int:
        """Start the ranks once all nodes are there, and again when some failed, max_restarts times at most.

        Raises SlimebusError when the nodes do not come together.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        self.peers = rendezvous(self.plan) if self.plan.nnodes > 1 else []
        try:
            return self._follow_node_0(self.peers[0]) if self.plan.node_rank else self._lead_nodes()
        finally:
            if self.ranks is not None:
                self.ranks.stop()
            for peer in self.peers:
                peer.close()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT go to the ranks, which save a checkpoint and leave once rank 0 says so: node 0 is asked for that."""
        self.is_stopping = True
        if self.ranks is None:
            raise KeyboardInterrupt
        self.ranks.send(number)
        if self.plan.node_rank:
            self.peers[0].send(leave=True)

    # --- node 0 ---

    def _lead_nodes(self) -> int:
        for attempt in range(self.max_restarts + 1):
            port = free_port()
            for peer in self.peers:
                peer.send(start=port)
            self.ranks = Ranks(self.plan, self.arguments, port)
            code = self._watch(self.ranks)
            if code in FINAL_CODES or self.is_stopping or attempt == self.max_restarts:
                break
            self.arguments = [word for word in self.arguments if word != "--take-over"]  # once: two launchers would replace each other
            log.warning("the ranks start again from the newest checkpoint (%d of %d)", attempt + 1, self.max_restarts)
        for peer in self.peers:
            peer.send(finish=code)
        return code

    def _watch(self, ranks: Ranks) -> int:
        """Until all ranks have ended well, or one has failed and all are ended: the exit code, of the first that failed on any node."""
        running, first = self.peers, End()
        while True:
            own = ranks.end()
            ends = {peer: end for peer in running if (end := self._end_of(peer))}
            running = [peer for peer in running if peer not in ends]
            failed = [end for end in (own, *ends.values()) if end and end.code]
            if failed and not first.code:
                first = failed[0]
                log.error(FAILED, first.failure)
                for peer in self.peers:
                    peer.send(stop=first.failure)
                ranks.stop()
            if own and not running:
                return first.code
            time.sleep(POLL_S)

    def _end_of(self, peer: NodeConnection) -> End | None:
        """How the ranks of another node have ended, where it has told. Its request to leave goes to the ranks here."""
        end = None
        for said in peer.receive(0.0):
            if "leave" in said:
                log.info("node %d is asked to stop, so all ranks save a checkpoint and leave", peer.node)
                self._pass_on(signal.SIGTERM, None)
            elif end is None:
                gone = End(GONE_CODE, f"node {peer.node} ({peer.address}) is gone")
                end = gone if "gone" in said else End(said["ended"], said["failure"])
        return end

    # --- another node ---

    def _follow_node_0(self, peer: NodeConnection) -> int:
        running: Ranks | None = None
        while True:
            for said in peer.receive(POLL_S):
                if "finish" in said:
                    if "problem" in said:
                        log.error("%s", said["problem"])
                    return int(said["finish"])
                if "gone" in said:
                    log.error("node 0 is gone, so the ranks here are ended")
                    return EXIT_FAILURE
                if "start" in said:
                    running = self.ranks = Ranks(self.plan, self.arguments, said["start"])
                elif self.ranks is not None:
                    log.error(FAILED, said["stop"])
                    self.ranks.stop()
            if running is not None and (end := running.end()):
                peer.send(ended=end.code, failure=end.failure)
                running = None

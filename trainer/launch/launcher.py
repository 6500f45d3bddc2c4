"""Starts the ranks of one node, ends them together, and with the launchers of the other nodes starts all of them again.

    rendezvous -> [start -> watch -> (a rank failed anywhere) -> stop everywhere -> start again] -> finish

A set of ranks that starts again goes on from the newest checkpoint, as any trainer does.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from slimebus.bus.errors import EXIT_FAILURE, EXIT_USAGE
from slimebus.process.launch import end_with_parent
from trainer.launch.plan import LAUNCHED, Plan
from trainer.launch.rendezvous import NodeConnection, rendezvous

log = logging.getLogger("trainer")

LOOK_S = 0.1
GONE_CODE = 70
"""Of a node whose launcher is gone: without it nothing can start again. It becomes the exit code."""
FINAL_CODES = (0, EXIT_USAGE)
"""Exit codes after which starting again makes no sense."""


class Ranks:
    """The processes of this node's ranks."""

    def __init__(self, plan: Plan, arguments: Sequence[str], port: int) -> None:
        self.processes = [_start(plan, arguments, port, local) for local in range(plan.ranks_here)]

    def code(self) -> int | None:
        """None while they run; 0 when all have ended well; else the exit code of one that failed, 1 where a signal ended it."""
        codes = [process.poll() for process in self.processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else EXIT_FAILURE
        return None if None in codes else 0

    def failure(self) -> str:
        """Which of them failed, in words."""
        failed = [(local, process.returncode) for local, process in enumerate(self.processes) if process.returncode]
        return ", ".join(f"local rank {local} ended with {signal.Signals(-code).name if code < 0 else code}" for local, code in failed)

    def send(self, number: int) -> None:
        """The signal to each that still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def stop(self) -> None:
        """End those that still run, at once: what they have trained since the newest checkpoint is lost, as by any death of a rank."""
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _start(plan: Plan, arguments: Sequence[str], port: int, local: int) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "RANK": str(plan.node_rank * plan.ranks_here + local),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(plan.ranks_here),
        "GROUP_RANK": str(plan.node_rank),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(port),
        LAUNCHED: "1",
    }
    command = [sys.executable, "-P", "-u", "-m", "slimebus", *arguments]  # -P: without the working directory on the path
    return subprocess.Popen(command, env=environment, preexec_fn=end_with_parent(signal.SIGKILL, os.getpid()), process_group=0)


class Launcher:
    """The launcher of one node. `run` returns the exit code of the whole trainer."""

    def __init__(self, plan: Plan, arguments: Sequence[str], max_restarts: int) -> None:
        self.plan, self.arguments, self.max_restarts = plan, arguments, max_restarts
        self.ranks: Ranks | None = None
        self.is_stopping = False

    def run(self, problem: str = "", settings: Mapping[str, str] | None = None) -> int:
        """Start the ranks once all nodes are there, and again when some failed, max_restarts times at most.

        problem: what is wrong on this node; then nothing is started anywhere. settings: what all nodes must share. Raises SlimebusError
        when the nodes do not come together.
        """
        with self._signals():
            peers = rendezvous(self.plan, problem, settings) if self.plan.nnodes > 1 else []
            try:
                if problem:
                    return EXIT_USAGE
                return self._follow(peers[0]) if self.plan.node_rank else self._lead(peers)
            finally:
                if self.ranks is not None:
                    self.ranks.stop()
                for peer in peers:
                    peer.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT go to the ranks, which save a checkpoint and leave."""

        def pass_on(number: int, frame: FrameType | None) -> None:
            self.is_stopping = True
            if self.ranks is None:
                raise KeyboardInterrupt
            self.ranks.send(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    # --- node 0 ---

    def _lead(self, peers: Sequence[NodeConnection]) -> int:
        for attempt in range(self.max_restarts + 1):
            port = free_port(self.plan)
            for peer in peers:
                peer.send(start=port, attempt=attempt)
            self.ranks = Ranks(self.plan, self.arguments, port)
            code, are_all_here = self._watch(self.ranks, peers, attempt)
            if code in FINAL_CODES or self.is_stopping or not are_all_here or attempt == self.max_restarts:
                break
            self.arguments = [word for word in self.arguments if word != "--take-over"]  # once: two launchers would replace each other
            log.warning("the ranks start again from the newest checkpoint (%d of %d)", attempt + 1, self.max_restarts)
        for peer in peers:
            peer.send(finish=code)
        return code

    def _watch(self, ranks: Ranks, peers: Sequence[NodeConnection], attempt: int) -> tuple[int, bool]:
        """Until all ranks have ended well, or one has failed and all are ended: the exit code, and whether all nodes are still there."""
        ended: dict[NodeConnection, int] = {}
        is_stopped = False
        while True:
            for peer in (peer for peer in peers if peer not in ended):
                codes = [code for said in peer.receive(0.0) if (code := _end_of(said, attempt)) is not None]
                ended |= {peer: codes[0]} if codes else {}
            code = ranks.code()
            failed = code or next((code for code in ended.values() if code), 0)
            if failed and not is_stopped:
                log.error("a rank failed, so all are ended: %s", ranks.failure() or "one of another node")
                for peer in peers:
                    peer.send(stop=attempt)
                ranks.stop()
                is_stopped = True
            if code is not None and len(ended) == len(peers):
                return failed, all(code != GONE_CODE for code in ended.values())
            time.sleep(LOOK_S)

    # --- another node ---

    def _follow(self, peer: NodeConnection) -> int:
        attempt, has_told = -1, True
        while True:
            for said in peer.receive(LOOK_S):
                if "finish" in said:
                    if "problem" in said:
                        log.error("%s", said["problem"])
                    return int(said["finish"])
                if "gone" in said:
                    log.error("node 0 is gone, so the ranks here are ended")
                    return EXIT_FAILURE
                if "start" in said:
                    self.ranks = Ranks(self.plan, self.arguments, said["start"])
                    attempt, has_told = said["attempt"], False
                elif said.get("stop") == attempt and self.ranks is not None:
                    self.ranks.stop()
            code = self.ranks.code() if self.ranks is not None else None
            if code is not None and self.ranks is not None and not has_told:
                if code:
                    log.error("a rank failed: %s", self.ranks.failure())
                    self.ranks.stop()
                peer.send(ended=code, attempt=attempt)
                has_told = True


def _end_of(said: Mapping[str, Any], attempt: int) -> int | None:
    """The exit code of a node's ranks, where a message tells it of this attempt."""
    if "gone" in said:
        return GONE_CODE
    return int(said["ended"]) if said.get("attempt") == attempt else None


def free_port(plan: Plan) -> int:
    """A TCP port of this node that nothing listens on now."""
    with socket.create_server(("127.0.0.1" if plan.nnodes == 1 else "", 0)) as probe:
        return int(probe.getsockname()[1])

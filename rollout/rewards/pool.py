"""The reward that a config asks for: each response gets a number, or what kept it from one. In processes; each can be killed: a late
reward, or one that ends its process, costs its own sample alone.

call --> least busy process --> verdicts
              |  silent for reward_timeout_s, or ended: killed; the call that ran has failed
              '--> the calls that waited behind it, or beside it, go to another process
"""

import asyncio
import os
import queue
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from rollout.rewards import wire
from rollout.rewards.wire import RewardSpec
from rollout.samples.plugins import Plugin, PluginError
from rollout.samples.response import Response
from slimebus.bus.errors import UsageError
from slimebus.config.schema import EvalDataset, RolloutConfig
from slimebus.hooks.hooks import text_of
from slimebus.process.launch import ChildProcess
from slimebus.process.process_guard import describe_exit_status

MAX_PROCESSES = max(2, min(8, (os.cpu_count() or 2) // 2))
SLOW_S = 0.1
"""A reward that takes longer gets another process for the calls that wait, up to MAX_PROCESSES."""
START_S = 300.0
"""Until a process has loaded the hook: it may load a model."""
CANCEL_S = 10.0
"""A coroutine function ends its own late calls within this; a process silent for longer is blocked."""
POLL_S, READ_BYTES = 0.5, 1 << 20

Verdicts = list[wire.Verdict]
Pending = asyncio.Future[Verdicts | None]
"""What a call will be answered; None: another call ended the process, and this one may be made again."""
Settled = tuple[Pending, Verdicts | None]


class RewardProcess:
    """One process and its calls, the oldest first. It ends when it is closed, and with this process, killed or not."""

    def __init__(self, spec: RewardSpec, plugin: Plugin) -> None:
        self.spec, self.name = spec, plugin.name
        self.limit_s = spec.timeout_s + (CANCEL_S if plugin.is_async else 0.0)
        self.calls: dict[int, Pending] = {}
        self.is_ready = self.has_ended = False
        self.heard_at = time.monotonic()
        self._lock, self._next, self._unsent = threading.Lock(), 1, queue.SimpleQueue[bytes]()
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-P", "-m", "rollout.rewards.process", msgspec.json.encode(spec).decode()]
        with theirs:
            self._process = ChildProcess(command, stdin=theirs.fileno()).process
        for target in (self._read_verdicts, self._write_calls):
            threading.Thread(target=target, name=self.name, daemon=True).start()

    async def call(self, responses: list[Response]) -> Verdicts | None:
        """What it answers; None when another call ended it. Raises an Exception for responses that cannot be sent."""
        with self._lock:
            if self.has_ended:
                return None
            call, self._next = self._next, self._next + 1
            self._unsent.put(wire.encode((call, responses)))
            if not self.calls:
                self.heard_at = max(self.heard_at, time.monotonic())
            answer = self.calls[call] = asyncio.get_running_loop().create_future()
        return await answer

    def close(self) -> None:
        """End it; it need not be waited for."""
        self._unsent.put(b"")

    def _write_calls(self) -> None:
        try:
            while frame := self._unsent.get():
                frames = [frame]
                while frames[-1] and not self._unsent.empty():
                    frames.append(self._unsent.get())
                self._socket.sendall(b"".join(frames))
                if not frames[-1]:
                    break
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:  # it has ended, which is noticed where it is read from
            return

    def _read_verdicts(self) -> None:
        unpacker, running, poll = wire.unpacker(), 0, select.poll()
        poll.register(self._socket, select.POLLIN)
        while True:
            silent_s = time.monotonic() - self.heard_at
            if self.calls and silent_s > (self.limit_s if self.is_ready else max(START_S, self.limit_s)):
                return self._end_process(running, f"took longer than reward_timeout_s = {self.spec.timeout_s:g} s")
            if not poll.poll(1000 * min(POLL_S, self.limit_s / 4)):
                continue
            try:
                got = self._socket.recv(READ_BYTES)
            except OSError:
                got = b""
            if not got:
                return self._end_process(running)
            self.heard_at, self.is_ready = time.monotonic(), True
            unpacker.feed(got)
            try:
                answers = [wire.typed(value, wire.Answer) for value in unpacker]
            except Exception:  # noqa: BLE001  a hook may write to any file of its process
                return self._end_process(running, "gave an answer that cannot be read")
            for _, running_now, _ in answers:
                running = running_now or running
            with self._lock:
                settled = [(self.calls.pop(call), verdicts) for call, _, verdicts in answers if verdicts is not None and call in self.calls]
            _deliver_results(settled)

    def _end_process(self, running: int, why: str = "") -> None:
        """Kill it. The call that ran, or else the oldest, has failed; where the reward could not be loaded, all of them."""
        self._process.terminate()
        with self._lock:
            self.has_ended, calls = True, dict(self.calls)
            self.calls.clear()
        how = "" if why else describe_exit_status(self._process.wait())
        culprit = running if running in calls else next(iter(calls), 0)
        alike = f"{self.name} {why or ('ended its process' if self.is_ready else 'could not be loaded in its process')}"
        failed = [wire.Verdict(failure=(alike, how))]
        _deliver_results([(answer, failed if call == culprit or not self.is_ready else None) for call, answer in calls.items()])
        self._unsent.put(b"")
        self._process.wait()
        self._socket.close()


def _deliver_results(settled: list[Settled]) -> None:
    """Hand answers to the event loops that wait for them, from another thread."""
    for loop in {answer.get_loop() for answer, _ in settled}:
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(_set_results, [one for one in settled if one[0].get_loop() is loop])


def _set_results(settled: list[Settled]) -> None:
    for answer, verdicts in settled:
        if not answer.done():  # its group was cancelled
            answer.set_result(verdicts)


class RewardPool:
    """The processes of one reward, started as they are needed."""

    def __init__(self, spec: RewardSpec, plugin: Plugin) -> None:
        self.spec, self.plugin = spec, plugin
        self.most = 1 if plugin.is_async else MAX_PROCESSES
        self.processes: list[RewardProcess] = []
        weakref.finalize(self, _close, self.processes)

    async def call(self, responses: list[Response]) -> list[PluginError | None]:
        """Call the reward once, with these; for each what kept it from a reward."""
        while True:
            try:
                verdicts = await self._choose().call(responses)
            except (TypeError, ValueError, OverflowError, RecursionError) as bad:  # what a generate hook put into a response
                return [PluginError(f"{self.plugin.name} cannot be given a response", text_of(bad))] * len(responses)
            if verdicts is None:
                continue
            if len(verdicts) != len(responses):
                verdicts = verdicts[:1] * len(responses)
            return [verdict.apply(response) for verdict, response in zip(verdicts, responses, strict=True)]

    def _choose(self) -> RewardProcess:
        self.processes[:] = [process for process in self.processes if not process.has_ended]
        best = min(self.processes, key=lambda process: len(process.calls), default=None)
        is_slow = best is not None and best.is_ready and bool(best.calls) and time.monotonic() - best.heard_at > SLOW_S
        if best is None or (is_slow and len(self.processes) < self.most):
            best = RewardProcess(self.spec, self.plugin)
            self.processes.append(best)
        return best


def _close(processes: list[RewardProcess]) -> None:
    for process in processes:
        process.close()


def find_reward(r: RolloutConfig, base: Path, dataset: EvalDataset | None = None) -> RewardSpec:
    """The reward of a config, or of an evaluation that has its own: a hook, or a built-in one by name. Raises UsageError or HookError."""
    own = dataset if dataset is not None and (dataset.rm_type or dataset.custom_rm_path) else r
    spec = RewardSpec(own.custom_rm_path or own.rm_type, str(base), r.reward_key, r.rm_url, r.reward_timeout_s)
    if "url" in spec.options and not r.rm_url:
        raise UsageError(f"rollout.rm_type: {spec.path} asks a server; give its address as rollout.rm_url")
    if (missing := spec.fact("missing")) and (problem := missing()):
        raise UsageError(f"rollout.rm_type: {spec.path} {problem}")
    signature = spec.load().signature()
    named = list(signature.parameters) if signature is not None else []
    return msgspec.structs.replace(spec, is_group=named[:1] == ["responses"])


class Reward:
    """One reward of a run, in processes of its own but for built-in ones that can do no harm."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec, self._plugin = spec, spec.load()
        self.name, self.pool = self._plugin.name, None if spec.fact("IN_WORKER") else RewardPool(spec, self._plugin)

    async def score(self, responses: Sequence[Response]) -> list[PluginError | None]:
        """Set the reward of each response that has none yet; for each, the error that kept it from getting one.

        A group reward is called once, with all responses. What a reward writes into `metadata` and `extras` of a response stays there.
        """
        given = {id(response): response.reward for response in responses if response.reward is not None}
        left = [response for response in responses if id(response) not in given]
        if self.pool is None:
            for response in left:
                response.reward = self._plugin.function(response)
            return [None] * len(responses)
        calls = [list(responses)] if self.spec.is_group and left else [[response] for response in left]
        outcomes = await asyncio.gather(*map(self.pool.call, calls))
        problems = {id(one): problem for call, found in zip(calls, outcomes, strict=True) for one, problem in zip(call, found, strict=True)}
        for response in responses:
            response.reward = given.get(id(response), response.reward)
        return [None if id(response) in given else problems.get(id(response)) for response in responses]

"""A reward process: loads one reward, and answers calls of it until its worker ends. `python -m rollout.rewards.process SPEC`.

A plain reward runs in the event loop, for one call after the other: that the process is silent then is what the worker looks at. Coroutine
functions run for all calls at once; the process says which of them runs, so that the worker knows who held up the others.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Coroutine, Generator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import msgspec

from rollout.rewards import wire
from rollout.rewards.wire import RewardSpec
from rollout.samples.plugins import PluginError, contain_exits
from rollout.samples.response import Response, reward_number
from slimebus.bus.sample_table import MAX_REWARD
from slimebus.hooks.hooks import text_of

ALIVE_S = 1.0
READ_BYTES = 1 << 20
CALL: ContextVar[int] = ContextVar("CALL", default=0)


class RewardLoop:
    """Calls of one reward, from a socket and back to it."""

    def __init__(self, spec: RewardSpec, connection: socket.socket) -> None:
        self.spec, self.connection = spec, connection
        self.plugin = spec.load()
        self.is_async, self.plugin.is_async = self.plugin.is_async, True  # a plain one is called here, not in a thread
        self._turn = contextlib.nullcontext() if self.is_async else asyncio.Lock()  # plain: one is answered before the next begins
        self._running = 0

    async def run(self) -> None:
        """Until the process ends, with its worker."""
        loop = asyncio.get_running_loop()
        contain_exits(loop)
        if self.is_async:
            contained = loop.get_task_factory()
            assert contained is not None
            loop.set_task_factory(lambda loop, work, **named: contained(loop, _Announced(self, work).run(), **named))
        threading.Thread(target=self._read_calls, args=(loop,), daemon=True).start()
        while True:
            self.send(0, 0, None)
            await asyncio.sleep(ALIVE_S if self.is_async else 1e9)

    def _read_calls(self, loop: asyncio.AbstractEventLoop) -> None:
        unpacker, tasks = wire.unpacker(), set[asyncio.Task[None]]()

        def begin(calls: list[wire.Call]) -> None:
            for call in calls:
                tasks.add(task := loop.create_task(self._answer_call(*call)))
                task.add_done_callback(tasks.discard)

        while got := self.connection.recv(READ_BYTES):
            unpacker.feed(got)
            loop.call_soon_threadsafe(begin, [wire.typed(value, wire.Call) for value in unpacker])
        os._exit(0)

    def send(self, about: int, running: int, verdicts: list[wire.Verdict] | None) -> None:
        """To the worker."""
        self.connection.sendall(wire.encode((about, running, verdicts)))

    def announce(self, call: int) -> None:
        """Say that this call runs now, unless it was the last to run."""
        if call and call != self._running:
            self._running = call
            self.send(0, call, None)

    async def _answer_call(self, call: int, responses: list[Response]) -> None:
        CALL.set(call)
        async with self._turn:
            try:
                given = await self.plugin(responses if self.spec.is_group else responses[0], timeout_s=self.spec.timeout_s)
                verdicts = list(map(self._verdict, responses, self._value_per_response(given, len(responses))))
            except PluginError as bad:
                verdicts = [wire.Verdict(failure=(bad.alike, bad.detail))] * len(responses)
            self.send(call, 0, verdicts)

    def _value_per_response(self, given: Any, num_responses: int) -> Sequence[Any]:
        """One value for each response."""
        if not self.spec.is_group:
            return [given]
        with contextlib.suppress(Exception):  # a plug-in's own class may fail in any way
            if len(values := list(given)) == num_responses:
                return values
        raise PluginError(f"{self.plugin.name} gave {text_of(given)}", f"expected a list of {num_responses} rewards, one for each response")

    def _verdict(self, response: Response, value: Any) -> wire.Verdict:
        """What the reward gave for this response. A map: reward_key says which of its values is the reward; the others are metadata."""
        try:
            if isinstance(value, dict):
                parts = {str(key): part for key, part in value.items()}
                value = parts.pop(self.spec.key)
                response.metadata = {**response.metadata, **parts}
            verdict = wire.Verdict(reward_number("it", value), response.metadata, response.extras)
        except KeyError:
            keys = ", ".join(map(text_of, value))
            return self._failure(
                f"{self.plugin.name} gave a map", f"rollout.reward_key is {self.spec.key!r}; expected one of its keys: {keys}"
            )
        except Exception:  # noqa: BLE001  a plug-in's own class may fail in any way when it is asked for a number
            return self._failure(f"{self.plugin.name} gave {text_of(value)}", f"expected a number within +-{MAX_REWARD:g}")
        try:
            wire.typed(msgspec.msgpack.decode(wire.encode(verdict)), wire.Verdict)
        except Exception as bad:  # noqa: BLE001  what it wrote into the response
            return self._failure(f"{self.plugin.name} gave a Response that cannot be used", text_of(bad))
        return verdict

    def _failure(self, alike: str, detail: str) -> wire.Verdict:
        return wire.Verdict(failure=(alike, detail))


class _Announced:
    """Runs `work`, and before each of its steps announces the call that it belongs to."""

    def __init__(self, loop: RewardLoop, work: Coroutine[Any, Any, Any]) -> None:
        self.loop, self.work = loop, work

    async def run(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        steps, error = self.work.__await__(), None
        while True:
            self.loop.announce(CALL.get())
            try:
                waited = steps.throw(error) if error is not None else steps.send(None)
            except StopIteration as done:
                return done.value
            try:
                error = None
                yield waited
            except BaseException as bad:  # noqa: BLE001  passed on to the work
                error = bad


def main(spec: str) -> None:
    """Serve the socket that is standard input."""
    with socket.socket(fileno=os.dup(0)) as connection:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")  # before the worker, the trainer or an engine
        with contextlib.suppress(ConnectionError):  # the worker has ended
            asyncio.run(RewardLoop(msgspec.json.decode(spec, type=RewardSpec), connection).run())


if __name__ == "__main__":
    main(sys.argv[1])

"""Generate hooks that let agents speak to the policy through the endpoint, agents that know OpenAI's API and nothing of training."""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

from rollout.endpoint.server import Endpoint
from rollout.samples.plugins import Plugin, PluginError
from rollout.samples.response import Task
from rollout.samples.session import Session
from slimebus.bus.errors import HookError

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Agent:
    """A hook that starts an agent for each sample: subclass it, and give a `command` or a method `run`.

    command: run with OPENAI_BASE_URL and OPENAI_API_KEY, which openai's clients take, and the task as JSON on its standard input.
    tool_call_parser: the name of SGLang's parser, where the worker's engine is an SGLang; empty: `<tool_call>{json}</tool_call>`.
    """

    command: list[str] = []
    tool_call_parser = ""

    async def setup(self) -> None:
        """Serve, for this worker alone."""
        self.endpoint = Endpoint(tool_call_parser=self.tool_call_parser)
        await self.endpoint.start("127.0.0.1", 0)

    async def teardown(self) -> None:
        """Stop serving."""
        await self.endpoint.close()

    async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
        """Do the task, from its prompt to its end; plain or async. A number is its reward, None leaves that to the run's."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            cwd=Path(inspect.getfile(type(self))).parent,  # what a hook names is beside it
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,
            env=os.environ | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
        )
        try:
            about = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata}
            await process.communicate(json.dumps(about).encode())
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            raise RuntimeError(f"{' '.join(self.command)} ended with exit status {process.returncode}")
        return None

    async def generate(self, session: Session) -> None:
        """Its conversations are the session's turns."""
        seat = self.endpoint.open(session)
        try:
            reward = await Plugin(f"{type(self).__name__}.run", self.run)(session.task, self.endpoint.base_url, seat.name)
        except PluginError as bad:
            if not session.errors:  # else the agent failed because the engine did
                session.errors.append(bad)  # it names the agent and its line already
            raise session.errors[-1] from None
        finally:
            self.endpoint.take_back(seat)
        session.metadata["contexts"] = len(session.responses())
        session.reward = session.reward if reward is None else reward


class OutsideAgents(Agent):
    """A hook with sessions that wait for agents that others run. A session ends with its reward, when it is deleted, or after idle_s.

    bind: where it listens; beyond this machine only with a key, from the environment variable `key_variable`.
    """

    bind = "127.0.0.1:8000"
    key_variable = "SLIMEBUS_ENDPOINT_KEY"
    idle_s = 600.0

    def judge(self, session: Session, messages: list[dict[str, Any]]) -> float | None:
        """What the last turn was worth, now that the next request is here; None: nothing is known yet. Plain or async."""

    async def setup(self) -> None:
        """Serve. Raises HookError where it cannot, or may not."""
        host, _, port = self.bind.rpartition(":")
        key = os.environ.get(self.key_variable, "")
        if not key and host not in LOOPBACK:
            raise HookError(f"{self.bind} can be reached by others; set a key in the environment variable {self.key_variable}")
        self.endpoint = Endpoint(key=key, tool_call_parser=self.tool_call_parser, judge=self.judge)
        try:
            await self.endpoint.start(host, int(port))
        except OSError as bad:
            raise HookError(f"cannot listen on {self.bind}: {bad.strerror}; of several workers on a host each needs a port") from None

    async def generate(self, session: Session) -> None:
        """Wait until somebody has had it, and made a turn. Of one who made none nothing stays for the next."""
        while not session.responses():
            seat = self.endpoint.offer(session)
            try:
                await seat.wait(self.idle_s)
            finally:
                self.endpoint.take_back(seat)
            async with seat.turn:  # one under way is still part of it
                if not session.responses():
                    session.restart()
        session.metadata["contexts"] = len(session.responses())

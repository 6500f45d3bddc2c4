"""Generate hooks that let agents speak to the policy through the endpoint, agents that know OpenAI's API and nothing of training."""

import asyncio
import inspect
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

from rollout.endpoint.server import Endpoint
from rollout.samples.plugins import HIDDEN, Plugin, PluginError
from rollout.samples.response import Task
from rollout.samples.session import Session
from slimebus.bus.errors import HookError
from slimebus.process.process_guard import can_hide, guarded_command

log = logging.getLogger("rollout")

LOOPBACK = ("127.0.0.1", "localhost", "::1")
SECRET = re.compile("SLIMEBUS_|TOKENS?$|SECRET|PASSWORD|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.IGNORECASE)
"""In the names of variables that an agent's program does not get."""


class Agent:
    """A hook that starts an agent for each sample: subclass it, and give a `command` or a method `run`.

    command: run with OPENAI_BASE_URL and OPENAI_API_KEY, which openai's clients take, and the task as JSON on its standard input.
    variables: those of ours that it gets although their names look like secrets. bind: where the endpoint listens.
    tool_call_parser: the name of SGLang's parser, where the worker's engine is an SGLang; empty: `<tool_call>{json}</tool_call>`.
    """

    command: list[str] = []
    variables: list[str] = []
    bind = "127.0.0.1:0"
    tool_call_parser = ""
    _http: Any = None

    async def setup(self) -> None:
        """Serve, for the agents of this worker alone. Raises HookError where it cannot."""
        if self.command and not can_hide():
            log.warning("programs of %s can read the keys and the folder of this run (docs/security.md)", type(self).__name__)
        await self._serve(Endpoint(tool_call_parser=self.tool_call_parser))

    async def _serve(self, endpoint: Endpoint) -> None:
        host, _, port = self.bind.rpartition(":")
        try:
            await endpoint.start(host, int(port))
        except OSError as bad:
            raise HookError(f"cannot listen on {self.bind}: {bad.strerror}; of several workers on a host each needs a port") from None
        self.endpoint = endpoint

    async def teardown(self) -> None:
        """Stop serving."""
        if self._http is not None:
            await self._http.aclose()
        await self.endpoint.close()

    def client(self, api_key: str) -> Any:
        """An `openai.AsyncOpenAI` for the session of this key, not to be closed: all share one pool of connections, which takes 30 ms."""
        import openai

        self._http = self._http or openai.DefaultAsyncHttpxClient(timeout=None)
        return openai.AsyncOpenAI(base_url=self.endpoint.base_url, api_key=api_key, http_client=self._http, timeout=None)

    async def run(self, task: Task, base_url: str, api_key: str) -> float | None:
        """Do the task, from its prompt to its end; plain or async. A number is its reward, None leaves that to the run's."""
        process = await asyncio.create_subprocess_exec(
            *guarded_command(self.command, HIDDEN.get()),
            cwd=Path(inspect.getfile(type(self))).parent,  # what a hook names is beside it
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,
            env={name: value for name, value in os.environ.items() if name in self.variables or not SECRET.search(name)}
            | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            start_new_session=True,
        )
        try:
            about = {"prompt": task.prompt, "label": task.label, "metadata": task.metadata}
            await process.communicate(json.dumps(about).encode())
        finally:
            if process.returncode is None:
                process.terminate()
        if process.returncode:
            raise RuntimeError(f"{' '.join(self.command)} ended with exit status {process.returncode}")
        return None

    async def generate(self, session: Session) -> None:
        """Its conversations are the session's turns."""
        slot = self.endpoint.open(session)
        try:
            reward = await Plugin(f"{type(self).__name__}.run", self.run)(session.task, self.endpoint.base_url, slot.name)
        except PluginError as bad:
            if not session.errors:  # else the agent failed because the engine did
                session.errors.append(bad)  # it names the agent and its line already
            raise session.errors[-1] from None
        finally:
            self.endpoint.release(slot)
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
        """What the last turn was worth, now that the next request is here; None: nothing is known yet. Plain or async.

        session: as it was when that request came, to read; what is put into its metadata stays.
        """

    async def setup(self) -> None:
        """Serve. Raises HookError where it cannot, or may not."""
        key = os.environ.get(self.key_variable, "")
        if not key and self.bind.rpartition(":")[0] not in LOOPBACK:
            raise HookError(f"{self.bind} can be reached by others; set a key in the environment variable {self.key_variable}")
        has_judge = type(self).judge is not OutsideAgents.judge
        judge = Plugin(f"{type(self).__name__}.judge", self.judge) if has_judge else None
        await self._serve(Endpoint(key=key, tool_call_parser=self.tool_call_parser, judge=judge))

    async def generate(self, session: Session) -> None:
        """Wait until somebody has had it, and made a turn. Of one who made none nothing stays for the next."""
        while not session.responses():
            slot = self.endpoint.publish(session)
            try:
                await slot.wait(self.idle_s)
            finally:
                self.endpoint.release(slot)
            async with slot.turn:  # one under way is still part of it
                if not session.responses():
                    session.restart()
        if slot.judging is not None:
            await slot.judging
        session.metadata["contexts"] = len(session.responses())

"""The generate hook of `rollout.environment`: for each sample an episode of a task of verifiers, through the endpoint (docs/agents.md).

session --task--> verifiers' Env --agents' requests--> Endpoint --> a branch of the session for each agent's run --> a sample
                                 '--rubric--> the reward of each
"""

import asyncio
import importlib
import logging
import os
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rollout.endpoint import Agent
from rollout.endpoint.server import SessionSlot
from rollout.samples.plugins import PluginError
from rollout.samples.session import Session
from slimebus.prompts.verifiers_tasks import TASK, load, tasks_of

log = logging.getLogger("rollout")

HARNESS = "slimebus_chat"


class Environment(Agent):
    """Its episodes run in an event loop of their own, in a thread: a rubric that blocks holds up no weights and no other agent's turn."""

    def __init__(self, name: str, base: Path) -> None:
        """Raises ConfigError where it cannot be loaded, or another release of verifiers is installed."""
        self.name, (self._vf, config, self._select) = f"environment {name}", load(name, base)
        self._path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(base.resolve()))))
        # The library looks a harness up by its id, as a module of its own package.
        sys.modules[f"verifiers.v1.harnesses.{HARNESS}"] = importlib.import_module("rollout.chat_harness")
        has_harness, roles = self._vf.default_harness_id(config.taskset.id) != "bash", {}
        for role, agent in config:
            if isinstance(agent, self._vf.AgentConfig):
                harness = agent.harness if agent.harness or has_harness else self._vf.HarnessConfig(id=HARNESS)
                runtime = agent.runtime if "runtime" in agent.model_fields_set else self._vf.SubprocessConfig()
                roles[role] = agent.model_copy(update={"harness": harness, "runtime": runtime})
        self._env = self._vf.load_environment(config.model_copy(update=roles))

    async def setup(self) -> None:
        """Serve, start what its tasks share, read them."""
        await super().setup()
        os.environ["PYTHONPATH"] = self._path  # verifiers starts servers of tools by the names of modules, which may be beside the run.yaml
        self._loop, self._stack = asyncio.new_event_loop(), AsyncExitStack()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self.name, daemon=True)
        self._thread.start()
        log.info("%s: starting the servers that its tasks share", self.name)
        await self._there(self._stack.enter_async_context(self._env.serving()))
        self._tasks = await asyncio.to_thread(tasks_of, self._env.taskset, self._select)

    async def teardown(self) -> None:
        """End all of that."""
        await self._there(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()
        await super().teardown()

    async def _there(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def generate(self, session: Session) -> list[Session]:  # type: ignore[override]
        """The samples of one episode: each run of an agent that is trained, with the reward that the rubric gave it."""
        if (task := self._tasks.get(session.task.metadata.get(TASK, ""))) is None:
            raise PluginError(f"the prompt is no task of {self.name}", f"its metadata has no {TASK!r} that is known; see docs/agents.md")
        runs: dict[str, tuple[Session, SessionSlot]] = {}

        def begin(trace: Any) -> None:
            runs[trace.id] = (own := session.branch()), self.endpoint.open(own, trace.id)

        client = self._vf.EvalClientConfig(base_url=self.endpoint.base_url, api_key_var="")
        try:
            episode = await self._there(self._env.run_episode(task, self._vf.ModelContext("policy", client), on_trace=begin))
        finally:
            for _, slot in runs.values():
                self.endpoint.release(slot)
        if errors := [*episode.errors, *(error for trace in episode.traces if not trace.ok for error in trace.errors)]:
            if not session.errors:  # else it failed because the engine did
                session.errors.append(PluginError(f"{self.name} failed: {errors[0].type}", errors[0].message))
            raise session.errors[-1]
        for trace in episode.traces:
            scores = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
            runs[trace.id][0].reward, runs[trace.id][0].metadata = trace.reward, {**scores, **trace.metrics}
        return [runs[trace.id][0] for trace in episode.traces if trace.agent.trainable]

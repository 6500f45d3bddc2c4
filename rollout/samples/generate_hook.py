"""The generate hook: a function `generate(session)`, or a class with a method of that name that is set up once a worker."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

from rollout.samples.plugins import Plugin, PluginError, failure
from rollout.samples.response import Response
from rollout.samples.session import Session
from slimebus.bus.errors import HookError
from slimebus.hooks.hooks import check_takes, text_of

TEARDOWN_S = 10.0


def instance_of(plugin: Plugin) -> Any:
    """The object of a plug-in that is a class. Raises HookError when it cannot be made without arguments."""
    try:
        return plugin.function()
    except (Exception, SystemExit) as bad:
        raise HookError(f"{plugin.name}: its class could not be made without arguments: {type(bad).__name__}: {text_of(bad)}") from bad


def method_of(name: str, instance: Any, method: str) -> Any:
    """What the instance has under this name, else None. Raises PluginError when that cannot be told, or it cannot be called."""
    try:
        found = getattr(instance, method, None)
    except (Exception, SystemExit) as bad:  # of a property, or of __getattr__
        raise failure(f"{name}.{method}", bad) from bad
    if found is not None and not callable(found):
        raise PluginError(f"{name}.{method} is {text_of(found)}", "expected something callable")
    return found


class GenerateHook:
    """A hook as the config names it. Loaded, made and checked here; `setup` comes before its first call, `teardown` after the last."""

    def __init__(self, path: str, base: Path) -> None:
        """Raises HookError when it cannot be called with a session."""
        self.plugin = Plugin.load("generate hook", path, base)
        self.instance: Any = None
        if inspect.isclass(self.plugin.function):
            self.instance = instance_of(self.plugin)
            if (method := method_of(self.plugin.name, self.instance, "generate")) is None:
                raise HookError(f"{self.plugin.name}: the class has no method generate(session)")
            self.plugin = Plugin(self.plugin.name, method)
        check_takes(self.plugin.name, self.plugin.function, ["session"])

    @classmethod
    def of(cls, name: str, instance: Any, method: str = "generate") -> "GenerateHook":
        """Of an object that is made already."""
        hook = cls.__new__(cls)
        hook.instance, hook.plugin = instance, Plugin(name, method_of(name, instance, method) if method else instance)
        return hook

    async def setup(self) -> None:
        """Call the class's `setup`, where it has one. Raises PluginError."""
        await self._call("setup")

    async def teardown(self) -> None:
        """Call its `teardown`; what is not done in time is left. Raises PluginError or TimeoutError."""
        async with asyncio.timeout(TEARDOWN_S):
            await self._call("teardown")

    async def _call(self, method: str) -> None:
        if (function := method_of(self.plugin.name, self.instance, method)) is not None:
            await Plugin(f"{self.plugin.name}.{method}", function)()

    async def __call__(self, session: Session) -> list[list[Response]]:
        """The samples of each session that is to be trained: those that it gives, or with None this one and all its branches.

        Raises PluginError, or what an engine raised through it.
        """
        given = await self.plugin(session, passes=session.errors)
        chosen = session.branches if given is None else [given] if isinstance(given, Session) else given
        if not isinstance(chosen, list | tuple) or not all(any(one is s for s in session.branches) for one in chosen):
            raise PluginError(f"{self.plugin.name} gave {type(given).__name__}", "expected None, its session, or a list of its branches")
        if len(set(map(id, chosen))) < len(chosen):
            raise PluginError(f"{self.plugin.name} gave a session twice", "expected each once: its tokens are trained once")
        if made := [responses for one in chosen if (responses := one.responses())]:
            return made
        raise PluginError(f"{self.plugin.name} made no sample", "call session.generate, or session.observe with is_trained=True")

"""The generate hook: a function `generate(session)`, or a class with a method of that name that is set up once a worker."""

import asyncio
import inspect
from pathlib import Path

from rollout.plugins import Plugin, PluginError
from rollout.response import Response
from rollout.session import Session
from slimebus.bus.errors import HookError

TEARDOWN_S = 10.0


class GenerateHook:
    """A hook as the config names it. Loaded, made and checked here; `setup` comes before its first call, `teardown` after the last."""

    def __init__(self, path: str, base: Path) -> None:
        """Raises HookError when it cannot be called with a session."""
        self.plugin = Plugin.load("generate hook", path, base)
        self.instance = None
        if inspect.isclass(self.plugin.function):
            try:
                self.instance = self.plugin.function()
            except Exception as bad:
                raise HookError(f"{self.plugin.name}: its class could not be made without arguments: {type(bad).__name__}: {bad}") from bad
            if not callable(method := getattr(self.instance, "generate", None)):
                raise HookError(f"{self.plugin.name}: the class has no method generate(session)")
            self.plugin = Plugin(self.plugin.name, method)
        try:
            if (signature := self.plugin.signature()) is not None:
                signature.bind(None)
        except TypeError as bad:
            raise HookError(f"{self.plugin.name}: {bad}; it is called with (session)") from None

    async def setup(self) -> None:
        """Call the class's `setup`, where it has one. Raises PluginError."""
        await self._call("setup")

    async def teardown(self) -> None:
        """Call its `teardown`; what is not done in time is left. Raises PluginError or TimeoutError."""
        async with asyncio.timeout(TEARDOWN_S):
            await self._call("teardown")

    async def _call(self, method: str) -> None:
        if function := getattr(self.instance, method, None):
            await Plugin(f"{self.plugin.name}.{method}", function)()

    async def __call__(self, session: Session) -> list[list[Response]]:
        """The samples of each session that is to be trained: those that it gives, or with None this one and all its branches.

        Raises PluginError, or what an engine raised through it.
        """
        given = await self.plugin(session, passes=session.errors)
        chosen = session.family if given is None else [given] if isinstance(given, Session) else given
        if not isinstance(chosen, list | tuple) or not all(any(one is s for s in session.family) for one in chosen):
            raise PluginError(f"{self.plugin.name} gave {type(given).__name__}", "expected None, its session, or a list of its branches")
        if len(set(map(id, chosen))) < len(chosen):
            raise PluginError(f"{self.plugin.name} gave a session twice", "expected each once: its tokens are trained once")
        if made := [responses for one in chosen if (responses := one.responses())]:
            return made
        raise PluginError(f"{self.plugin.name} made no sample", "call session.generate, or session.observe with is_trained=True")

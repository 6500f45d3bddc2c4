"""The user's hooks of a worker (docs/hooks.md): the generate hook, a function `generate(session)`, or a class with a method of that name
that is set up once a worker; and the class of `rollout.hooks_path`, which adds to the groups of a worker.
"""

import asyncio
import difflib
import inspect
from pathlib import Path
from typing import Any

import numpy as np

from rollout.samples.plugins import Plugin, PluginError, failure
from rollout.samples.response import Response, Task, reward_number
from rollout.samples.session import Session
from slimebus.bus.errors import HookError
from slimebus.bus.samples import Sample, decode_group, encode_group
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


METHODS = {"after_generate": "response", "is_trained": "sample", "on_group": "samples is_kept task", "log": "", "evaluate": "session"}
"""The methods that it may have, and what each is called with."""
SIMILAR = 0.75
"""From 0 to 1, of difflib: what is so near to one of these names, or to setup and teardown, is taken for it misspelt."""
MAX_NUMBERS, MAX_NAME = 32, 64
"""Of `log`: the broker keeps 64 numbers of a heartbeat, the worker's own among them."""


class WorkerHooks:
    """Each method is called where the class has it. Whatever one raises or gives that cannot be used is a PluginError."""

    def __init__(self, path: str, base: Path, timeout_s: float) -> None:
        """timeout_s: of a call. Raises HookError for a class that has no method of these, or one with other arguments."""
        name, self._timeout_s = f"hooks {path}", timeout_s
        instance = instance_of(Plugin.load("hooks", path, base))
        found = {method: method_of(name, instance, method) for method in METHODS}
        self._plugins = {method: Plugin(f"{name}.{method}", function) for method, function in found.items() if function is not None}
        if not self._plugins:
            raise HookError(f"{name}: the class has none of {', '.join(METHODS)}{_misspelt(instance)}")
        if said := _misspelt(instance):
            raise HookError(f"{name}: the class has a method that is never called{said}; begin the name of one of your own with _")
        for method, plugin in self._plugins.items():
            check_takes(plugin.name, plugin.function, METHODS[method].split())
        self.numbers: dict[str, float] = {}
        """What `log` gave last, for the worker's metrics."""
        self.evaluate = GenerateHook.of(f"{name}.evaluate", instance, "evaluate") if "evaluate" in self._plugins else None
        self.life = GenerateHook.of(name, instance, "")
        """Its `setup` and `teardown`."""

    async def after_reward(self, samples: list[Sample], task: Task, *, is_kept: bool) -> None:
        """Take samples out of the loss, and show it the group; it gets copies. task: of its first sample."""
        copies = decode_group(encode_group(samples))
        for sample, copy in zip(samples, copies, strict=True) if "is_trained" in self._plugins and not task.dataset else ():
            answer = await self.call("is_trained", copy)
            if not isinstance(answer, bool | np.bool_):
                raise PluginError(f"{self._plugins['is_trained'].name} gave {text_of(answer)}", "expected True or False")
            if not answer:
                sample.loss_mask[:] = 0
        await self.call("on_group", copies, is_kept, task)
        given = await self.call("log")
        try:
            self.numbers = _numbers({} if given is None else dict(given))
        except (Exception, SystemExit) as bad:  # its own class of maps or keys may fail in any way
            raise PluginError(f"{self._plugins['log'].name} gave {text_of(given)}", f"expected a map of numbers: {text_of(bad)}") from bad

    async def call(self, method: str, *arguments: Any) -> Any:
        """What this method gives; None where the class has none."""
        if plugin := self._plugins.get(method):
            return await plugin(*arguments, timeout_s=self._timeout_s)
        return None


def _misspelt(instance: Any) -> str:
    """Of a method with nearly the name of one that is called: `; its x: did you mean 'y'?`, else nothing."""
    called = [*METHODS, "setup", "teardown"]
    for method in dir(type(instance)):
        if method.startswith("_") or method in called or not callable(inspect.getattr_static(type(instance), method)):
            continue
        if near := difflib.get_close_matches(method, called, 1, SIMILAR):
            return f"; its {method}: did you mean {near[0]!r}?"
    return ""


def _numbers(given: dict[Any, Any]) -> dict[str, float]:
    """Those that a heartbeat has room for, beside the worker's own. Raises ValueError, or what the map's own classes raise."""
    named = {str(name): value for name, value in given.items()}
    if len(named) > MAX_NUMBERS or any(len(name) > MAX_NAME for name in named):
        raise ValueError(f"at most {MAX_NUMBERS} names, each of at most {MAX_NAME} characters")
    "".join(named).encode()  # a lone surrogate cannot be sent
    return {name: reward_number(name, value) for name, value in named.items()}

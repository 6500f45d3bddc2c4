"""The class of `rollout.hooks_path`: what a user adds around the groups of a worker (docs/hooks.md)."""

import difflib
import inspect
from pathlib import Path
from typing import Any

import numpy as np

from rollout.samples.generate_hook import GenerateHook, instance_of, method_of
from rollout.samples.plugins import Plugin, PluginError
from rollout.samples.response import Task, reward_number
from slimebus.bus.errors import HookError
from slimebus.bus.samples import Sample, decode_group, encode_group
from slimebus.hooks.hooks import check_takes, text_of

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

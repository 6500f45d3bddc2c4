"""What goes between a worker and its reward processes: msgpack, one value after the other; nothing that could run.

worker --> process   [call, [response, ...]]
process --> worker   [0, 0, null] ready, or alive;  [0, call, null] this call runs now;  [call, 0, [verdict, ...]] it is done
"""

import functools
import importlib
import inspect
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np

from rollout.samples.plugins import Plugin, PluginError
from rollout.samples.response import Response, plain

MAX_BYTES = (1 << 32) - 1
Call = tuple[int, list[Response]]


class RewardSpec(msgspec.Struct, frozen=True):
    """A reward as its processes load it: the name of a built-in one or an import path, and the folder of the run.yaml.

    is_group: it is called once with all responses of a group.
    """

    path: str
    base: str
    key: str
    url: str
    timeout_s: float
    is_group: bool = False

    def fact(self, name: str) -> Any:
        """What a built-in one's file says of it under this name: `missing`, a function, why it cannot be used here; IN_WORKER: True for
        one so quick and harmless that it needs no process. None where it says nothing."""
        return None if ":" in self.path else getattr(importlib.import_module(f"rollout.rewards.{self.path}"), name, None)

    @property
    def options(self) -> dict[str, Any]:
        """What a built-in one takes besides the response, of url and timeout_s."""
        function = self.fact("reward")
        taken = inspect.signature(function).parameters if function is not None else {}
        return {name: getattr(self, name) for name in ("url", "timeout_s") if name in taken}

    def load(self) -> Plugin:
        """Raises HookError when it cannot be called with one argument."""
        is_built_in = ":" not in self.path
        path = f"rollout.rewards.{self.path}:reward" if is_built_in else self.path
        plugin = Plugin.load("reward", path, None if is_built_in else Path(self.base), [] if is_built_in else ["response"])
        if self.options:
            plugin.function = functools.partial(plugin.function, **self.options)
        return plugin


class Verdict(msgspec.Struct, array_like=True):
    """Of one response: its reward with what the reward wrote into it, or why there is none (PluginError: alike, detail)."""

    reward: float | None = None
    metadata: dict[str, Any] = {}
    extras: dict[str, np.ndarray] = {}
    failure: tuple[str, str] | None = None

    def apply(self, response: Response) -> PluginError | None:
        """Bring it to the response; the error that kept it from a reward."""
        if self.failure is not None:
            return PluginError(*self.failure)
        response.reward, response.metadata, response.extras = self.reward, self.metadata, self.extras
        return None


Answer = tuple[int, int, list[Verdict] | None]


def encode(value: Any) -> bytes:
    """As msgpack; an array as its dtype, shape and bytes. Raises an Exception for what cannot be sent."""
    return msgspec.msgpack.encode(value, enc_hook=_encoded)


def unpacker() -> msgpack.Unpacker:
    """Fed with bytes as they come, it gives one value after the other."""
    return msgpack.Unpacker(max_buffer_size=MAX_BYTES, strict_map_key=False)


def typed(value: Any, kind: Any) -> Any:
    """A value of the unpacker as a Call or an Answer. Raises msgspec.ValidationError."""
    return msgspec.convert(value, kind, dec_hook=_decoded)


def _encoded(value: Any) -> Any:
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, value.tobytes()
    if (number := plain(value)) is value:
        raise TypeError(f"a {type(value).__name__} cannot be sent")
    return number


def _decoded(kind: type, value: Any) -> Any:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(f"got a {type(value).__name__}; expected an array")
    dtype, shape, content = value
    return np.frombuffer(content, dtype).reshape(shape).copy()

"""Built-in rewards by name, and the call that any reward goes through."""

import asyncio
import inspect
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any, SupportsFloat

from rollout.response import Response
from slimebus import hooks
from slimebus.errors import HookError, SlimebusError, UsageError

BUILT_IN = {"exact": "rollout.rewards.exact:reward", "math": "rollout.rewards.math:reward", "random": "rollout.rewards.random:reward"}

Reward = Callable[[Response], Any]


def find(rm_type: str, custom_rm_path: str, base: Path | None) -> Reward:
    """The reward function of a config: a hook, or a built-in one by name. Raises UsageError or HookError."""
    if custom_rm_path:
        return hooks.load(custom_rm_path, base=base)
    if rm_type not in BUILT_IN:
        raise UsageError(f"rollout.rm_type: no built-in reward {rm_type!r}; expected one of {', '.join(BUILT_IN)}, or set custom_rm_path")
    return hooks.load(BUILT_IN[rm_type])


async def score(reward: Reward, responses: list[Response], timeout_s: float) -> list[SlimebusError | None]:
    """Set the reward of each response that has none yet; for each, the error that kept it from getting one.

    A plain function runs in a thread, one call after the other; a coroutine function runs for all responses at once.
    """
    todo = [r for r in responses if r.reward is None]
    if inspect.iscoroutinefunction(reward):
        outcomes = await asyncio.gather(*(_one(reward, r, timeout_s) for r in todo))
    else:
        try:
            outcomes = await asyncio.wait_for(asyncio.to_thread(lambda: [_call(reward, r) for r in todo]), timeout_s)
        except TimeoutError:
            outcomes = [_late(reward, timeout_s) for _ in todo]
    for response, outcome in zip(todo, outcomes, strict=True):
        response.reward = outcome if isinstance(outcome, float) else None
    problems = {id(r): outcome for r, outcome in zip(todo, outcomes, strict=True) if isinstance(outcome, SlimebusError)}
    return [problems.get(id(r)) for r in responses]


async def _one(reward: Reward, response: Response, timeout_s: float) -> float | SlimebusError:
    try:
        return _accept(reward, await asyncio.wait_for(reward(response), timeout_s))
    except TimeoutError:
        return _late(reward, timeout_s)
    except Exception as bad:  # noqa: BLE001  a plug-in may fail in any way; the sample is counted as failed
        return _broken(reward, bad)


def _call(reward: Reward, response: Response) -> float | SlimebusError:
    try:
        return _accept(reward, reward(response))
    except Exception as bad:  # noqa: BLE001  a plug-in may fail in any way; the sample is counted as failed
        return _broken(reward, bad)


def _accept(reward: Reward, value: Any) -> float | SlimebusError:
    if isinstance(value, SupportsFloat) and not isinstance(value, str) and isfinite(number := float(value)):
        return number
    return HookError(f"reward {_path(reward)} gave {value!r}; expected a finite number")


def _late(reward: Reward, timeout_s: float) -> SlimebusError:
    return HookError(f"reward {_path(reward)} took longer than reward_timeout_s = {timeout_s:g} s", code="reward_timeout")


def _broken(reward: Reward, bad: Exception) -> SlimebusError:
    return HookError(f"reward {_path(reward)} failed: {type(bad).__name__}: {bad}", code="reward_failed")


def _path(reward: Reward) -> str:
    return f"{getattr(reward, '__module__', '?')}:{getattr(reward, '__name__', '?')}"

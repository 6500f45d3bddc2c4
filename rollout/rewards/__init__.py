"""Built-in rewards by name, and the call that any reward goes through."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rollout.plugins import Plugin, PluginError
from rollout.response import Response, reward_number
from slimebus.bus.errors import UsageError
from slimebus.bus.sample_table import MAX_REWARD
from slimebus.cli.hooks import text_of

BUILT_IN = {"exact": "rollout.rewards.exact:reward", "math": "rollout.rewards.math:reward", "random": "rollout.rewards.random:reward"}


def find(rm_type: str, custom_rm_path: str, base: Path | None) -> Plugin:
    """The reward function of a config: a hook, or a built-in one by name. Raises UsageError or HookError."""
    if custom_rm_path:
        return Plugin.load("reward", custom_rm_path, base, ["response"])
    if rm_type not in BUILT_IN:
        raise UsageError(f"rollout.rm_type: no built-in reward {rm_type!r}; expected one of {', '.join(BUILT_IN)}, or set custom_rm_path")
    return Plugin.load("reward", BUILT_IN[rm_type], None)


async def score(reward: Plugin, responses: Sequence[Response], timeout_s: float) -> list[PluginError | None]:
    """Set the reward of each response that has none yet; for each, the error that kept it from getting one.

    A plain function runs in threads, for one response after the other; a coroutine function runs for all responses at once.
    """
    if reward.is_async:
        return await asyncio.gather(*(_score_one(reward, r, timeout_s) for r in responses))
    return [await _score_one(reward, r, timeout_s) for r in responses]


async def _score_one(reward: Plugin, response: Response, timeout_s: float) -> PluginError | None:
    if response.reward is not None:
        return None
    try:
        value = await reward(response, timeout_s=timeout_s)
    except PluginError as bad:
        return bad
    try:
        response.reward = reward_number("it", value)
    except Exception:  # noqa: BLE001  a plug-in's own class may fail in any way when it is asked for a number
        response.reward = None
        return PluginError(f"{reward.name} gave {text_of(value)}", f"expected a number within +-{MAX_REWARD:g}")
    return None

"""The call that any reward goes through: each response gets a number, or the error that kept it from getting one."""

import asyncio
from collections.abc import Sequence

from rollout.plugins import Plugin, PluginError
from rollout.response import Response, reward_number
from slimebus.bus.sample_table import MAX_REWARD
from slimebus.cli.hooks import text_of


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

"""The call that any reward goes through: each response gets a number, or the error that kept it from getting one."""

import asyncio
from collections.abc import Sequence

from rollout.rewards.pool import RewardPool
from rollout.rewards.registry import IN_WORKER
from rollout.rewards.wire import RewardSpec
from rollout.samples.plugins import PluginError
from rollout.samples.response import Response


class Reward:
    """One reward of a run, in processes of its own but for built-in ones that can do no harm."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec, self._plugin = spec, spec.load()
        self.name, self.pool = self._plugin.name, None if spec.path in IN_WORKER else RewardPool(spec, self._plugin)

    async def score(self, responses: Sequence[Response]) -> list[PluginError | None]:
        """Set the reward of each response that has none yet; for each, the error that kept it from getting one.

        A group reward is called once, with all responses. What a reward writes into `metadata` and `extras` of a response stays there.
        """
        given = {id(response): response.reward for response in responses if response.reward is not None}
        left = [response for response in responses if id(response) not in given]
        if self.pool is None:
            for response in left:
                response.reward = self._plugin.function(response)
            return [None] * len(responses)
        calls = [list(responses)] if self.spec.is_group and left else [[response] for response in left]
        outcomes = await asyncio.gather(*map(self.pool.call, calls))
        problems = {id(one): problem for call, found in zip(calls, outcomes, strict=True) for one, problem in zip(call, found, strict=True)}
        for response in responses:
            response.reward = given.get(id(response), response.reward)
        return [None if id(response) in given else problems.get(id(response)) for response in responses]

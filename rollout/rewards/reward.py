"""The reward that a config asks for, and the call that any reward goes through: each response gets a number, or what kept it from one."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rollout.rewards.pool import RewardPool
from rollout.rewards.wire import RewardSpec
from rollout.samples.plugins import PluginError
from rollout.samples.response import Response
from slimebus.bus.errors import UsageError
from slimebus.config.schema import EvalDataset, RolloutConfig


def find_reward(r: RolloutConfig, base: Path, dataset: EvalDataset | None = None) -> RewardSpec:
    """The reward of a config, or of an evaluation that has its own: a hook, or a built-in one by name. Raises UsageError or HookError."""
    own = dataset if dataset is not None and (dataset.rm_type or dataset.custom_rm_path) else r
    spec = RewardSpec(own.custom_rm_path or own.rm_type, str(base), r.reward_key, r.rm_url, r.reward_timeout_s)
    if "url" in spec.options and not r.rm_url:
        raise UsageError(f"rollout.rm_type: {spec.path} asks a server; give its address as rollout.rm_url")
    if (missing := spec.fact("missing")) and (problem := missing()):
        raise UsageError(f"rollout.rm_type: {spec.path} {problem}")
    signature = spec.load().signature()
    named = list(signature.parameters) if signature is not None else []
    return msgspec.structs.replace(spec, is_group=named[:1] == ["responses"])


class Reward:
    """One reward of a run, in processes of its own but for built-in ones that can do no harm."""

    def __init__(self, spec: RewardSpec) -> None:
        self.spec, self._plugin = spec, spec.load()
        self.name, self.pool = self._plugin.name, None if spec.fact("IN_WORKER") else RewardPool(spec, self._plugin)

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

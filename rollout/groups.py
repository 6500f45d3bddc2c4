"""One leased group, from its prompt to its samples: generate, reward, filter."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout import partials, rewards
from rollout.engines import Engines
from rollout.response import Response, Task, to_sample
from rollout.tokenizer import Tokenizer
from slimebus import hooks
from slimebus.config.schema import RunConfig
from slimebus.dynamic_filter import is_reward_spread
from slimebus.errors import HookError, ProtocolError, SlimebusError
from slimebus.messages import LeasedGroup
from slimebus.samples import Sample

log = logging.getLogger("rollout")

HOOK_ARGUMENTS = ("task", "engines", "tokenizer")


class Dropped(Exception):
    """The dynamic filter wants this group replaced; the text is the reason, num_tokens what was made for nothing."""

    def __init__(self, text: str, num_tokens: int, rewards: list[float | None]) -> None:
        super().__init__(text)
        self.num_tokens, self.rewards = num_tokens, rewards


class GroupMaker:
    """Makes the samples of groups as the config says; hooks and rewards are loaded, and so checked, at construction."""

    def __init__(self, config: RunConfig, base: Path, tokenizer: Tokenizer, engines: Engines | None) -> None:
        self.config, self.tokenizer, self.engines = config, tokenizer, engines
        r = config.rollout
        self.reward = rewards.find(r.rm_type, r.custom_rm_path, base)
        self.eval_rewards = {
            name: rewards.find(d.rm_type, d.custom_rm_path, base) if d.rm_type or d.custom_rm_path else self.reward
            for name, d in config.eval.datasets.items()
        }
        self.hook = _generate_hook(r.custom_generate_function_path, base)
        path = r.dynamic_sampling_filter_path
        self.keep = hooks.load(path, base=base) if path and not is_reward_spread(path) else None

    async def make(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any] = ()) -> list[Sample]:
        """The group's samples, continuing the frames of `partial`.

        Raises Dropped when the filter refuses them, Unfinished when the worker leaves, SlimebusError when it cannot be made.
        """
        tasks = self._tasks(leased, record)
        responses = await self._generate(tasks, self._begun(tasks, partial), is_eval=leased.kind == "eval")
        self._fill_text(responses)
        reward = self.eval_rewards.get(leased.dataset, self.reward) if leased.kind == "eval" else self.reward
        problems = await rewards.score(reward, responses, self.config.rollout.reward_timeout_s)
        for problem in {p.text: p for p in problems if p is not None}.values():
            log.warning("group %s: %s", leased.group, problem.text)
        samples = [to_sample(r, failed=p is not None) for r, p in zip(responses, problems, strict=True)]
        if leased.kind == "train" and not self._is_kept(samples):
            raise Dropped("filtered", sum(len(sample.tokens) for sample in samples), [sample.reward for sample in samples])
        return samples

    def _is_kept(self, samples: list[Sample]) -> bool:
        if self.keep is None:
            return True
        try:
            return bool(self.keep(samples))
        except Exception as bad:  # a plug-in may fail in any way; the group is given back as failed
            path = self.config.rollout.dynamic_sampling_filter_path
            raise HookError(f"dynamic filter {path}: {type(bad).__name__}: {bad}") from bad

    def _tasks(self, leased: LeasedGroup, record: bytes) -> list[Task]:
        prompt: dict[str, Any] = msgspec.msgpack.decode(record)
        metadata = prompt.get("metadata") or {}
        tools = metadata.get("tools")
        has_tools = isinstance(prompt["prompt"], list) and isinstance(tools, list) and tools
        ids = self.tokenizer.encode_prompt(prompt["prompt"], *([tools] if has_tools else []))
        shared = {"prompt": prompt["prompt"], "prompt_ids": ids, "label": prompt.get("label"), "metadata": metadata}
        ids.flags.writeable = False  # shared by the group's tasks
        return [
            Task(**shared, sampling=dict(leased.sampling), group=leased.group, dataset=leased.dataset, index=i)
            for i in range(leased.num_samples)
        ]

    @property
    def takes_partials(self) -> bool:
        """True when samples that another worker began can be continued here."""
        return self.hook is None and self.engines is not None

    def continues(self, leased: LeasedGroup) -> bool:
        """True for a group whose samples can be cut off and continued: the engine makes them, not a hook."""
        return leased.kind == "train" and self.takes_partials

    def _begun(self, tasks: list[Task], partial: Sequence[Any]) -> list[Response] | None:
        if not partial or self.hook is not None:
            return None
        try:
            return partials.begun(tasks, partial)
        except ProtocolError as bad:
            log.warning("%s; sampling it from its prompt", bad.text)
            return None

    async def _generate(self, tasks: list[Task], begun: list[Response] | None, *, is_eval: bool) -> list[Response]:
        if self.hook is None or (is_eval and self.engines is not None and self.config.algorithm.loss_type == "sft_loss"):
            assert self.engines is not None  # config.check: without an engine there is a hook
            return await self.engines.sample(tasks, begun)
        outcomes = await asyncio.gather(*(self._call_hook(task) for task in tasks))
        return [response for outcome in outcomes for response in outcome]

    async def _call_hook(self, task: Task) -> list[Response]:
        assert self.hook is not None
        path = self.config.rollout.custom_generate_function_path
        offered = {"task": task, "engines": self.engines, "tokenizer": self.tokenizer}
        try:
            made = self.hook(**{name: offered[name] for name in inspect.signature(self.hook).parameters})
            made = await made if inspect.isawaitable(made) else made
        except (SlimebusError, partials.Unfinished):
            raise
        except Exception as bad:  # a plug-in may fail in any way; the group is given back as failed
            raise HookError(f"generate hook {path}: {type(bad).__name__}: {bad}") from bad
        made = [made] if isinstance(made, Response) else made
        if not isinstance(made, list) or not made or not all(isinstance(r, Response) for r in made):
            raise HookError(f"generate hook {path}: gave {type(made).__name__}; expected a Response or a list of them")
        return made

    def _fill_text(self, responses: list[Response]) -> None:
        blank = [r for r in responses if not r.text]
        if not blank:
            return
        for response, text in zip(blank, self.tokenizer.decode_batch([r.token_ids for r in blank]), strict=True):
            response.text = text


def _generate_hook(path: str, base: Path) -> Callable[..., Any] | None:
    if not path:
        return None
    hook = hooks.load(path, base=base)
    unknown = [name for name in inspect.signature(hook).parameters if name not in HOOK_ARGUMENTS]
    if unknown:
        raise HookError(f"generate hook {path}: unknown argument {unknown[0]!r}; it may take {', '.join(HOOK_ARGUMENTS)}")
    return hook

"""One leased group, from its prompt to its samples: generate, reward, filter."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from rollout import partials
from rollout.engines.pool import Engines
from rollout.plugins import Plugin, PluginError, failure
from rollout.response import Response, Task, normalise, to_sample
from rollout.rewards import registry, scoring
from rollout.tokenizer import Tokenizer
from slimebus.bus.errors import HookError, ProtocolError, SlimebusError
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample, decode_group, encode_group
from slimebus.cli.config.schema import RunConfig
from slimebus.cli.dynamic_filter import is_reward_spread
from slimebus.cli.hooks import text_of

log = logging.getLogger("rollout")

HOOK_ARGUMENTS = ("task", "engines", "tokenizer")


class Dropped(Exception):
    """The dynamic filter wants this group replaced; the text is the reason, num_tokens what was made for nothing."""

    def __init__(self, text: str, num_tokens: int, rewards: list[float | None]) -> None:
        super().__init__(text)
        self.num_tokens, self.rewards = num_tokens, rewards


class HookEngines:
    """The engines as one call of a hook sees them. errors: theirs that came through it, which are not the hook's own."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self.errors: list[BaseException] = []

    async def sample(self, tasks: list[Task]) -> list[Response]:
        """One response to each task, its own prompt_ids and temperature with it. Raises SlimebusError, of which a hook need catch none."""
        try:
            return await self._engines.sample(tasks)
        except (SlimebusError, partials.Unfinished) as error:
            if getattr(error, "retryable", True):
                self.errors.append(error)
            raise


class GroupMaker:
    """Makes the samples of groups as the config says; hooks and rewards are loaded, and so checked, at construction."""

    def __init__(self, config: RunConfig, base: Path, tokenizer: Tokenizer, engines: Engines | None, vocab_size: int | None = None) -> None:
        """vocab_size: the model's; token ids of hooks are below it."""
        self.config, self.tokenizer, self.engines, self.vocab_size = config, tokenizer, engines, vocab_size
        r = config.rollout
        self.reward = registry.find(r.rm_type, r.custom_rm_path, base)
        self.eval_rewards = {
            name: registry.find(d.rm_type, d.custom_rm_path, base) if d.rm_type or d.custom_rm_path else self.reward
            for name, d in config.eval.datasets.items()
        }
        path = r.custom_generate_function_path
        self.hook = Plugin.load("generate hook", path, base) if path else None
        self.hook_arguments = _arguments_of(self.hook) if self.hook else ()
        path = r.dynamic_sampling_filter_path
        self.keep = Plugin.load("dynamic filter", path, base, ["samples"]) if path and not is_reward_spread(path) else None

    async def make(self, leased: LeasedGroup, record: bytes, partial: Sequence[Any] = ()) -> list[Sample]:
        """The group's samples, continuing the frames of `partial`.

        Raises Dropped when the filter refuses them, Unfinished when the worker leaves, TimeoutError when sampling takes longer than
        generate_timeout_s, SlimebusError when it cannot be made: PluginError for whatever a plug-in or the chat template did.
        """
        tasks = self._tasks(leased, record)
        async with asyncio.timeout(self.config.rollout.generate_timeout_s):
            responses = await self._generate(tasks, self._begun(tasks, partial), is_eval=leased.kind == "eval")
        self._fill_text(responses)
        reward = self.eval_rewards.get(leased.dataset, self.reward) if leased.kind == "eval" else self.reward
        problems = await scoring.score(reward, responses, self.config.rollout.reward_timeout_s)
        for problem in {p.alike: p for p in problems if p is not None}.values():
            log.warning("group %s: %s", leased.group, problem.text)
        if problems[0] is not None and all(problems) and leased.kind == "train":
            raise problems[0]
        self._check(reward.name, responses)
        samples = [to_sample(r, failed=p is not None) for r, p in zip(responses, problems, strict=True)]
        if leased.kind == "train" and not await self._is_kept(samples):
            raise Dropped("filtered", sum(len(sample.tokens) for sample in samples), [sample.reward for sample in samples])
        return samples

    async def _is_kept(self, samples: list[Sample]) -> bool:
        if self.keep is None:
            return True
        copies = decode_group(encode_group(samples))  # it may change them
        answer = await self.keep(copies, timeout_s=self.config.rollout.reward_timeout_s)
        try:
            return bool(answer)
        except Exception as bad:  # an array of several values, say
            raise PluginError(f"{self.keep.name} gave {text_of(answer)}", "expected True or False") from bad

    def _tasks(self, leased: LeasedGroup, record: bytes) -> list[Task]:
        prompts: list[dict[str, Any]] = [msgspec.msgpack.decode(record) for _ in range(leased.num_samples)]  # each task owns all it has
        prompt, metadata = prompts[0]["prompt"], prompts[0].get("metadata") or {}
        tools = metadata.get("tools")
        has_tools = isinstance(prompt, list) and isinstance(tools, list) and tools
        try:
            ids = self.tokenizer.encode_prompt(prompt, *([tools] if has_tools else []))
        except SlimebusError:
            raise
        except Exception as bad:  # a template is a program of the user's
            name = "tokenizer" if isinstance(prompt, str) else "chat template"
            raise failure(f"{name} of {self.config.model.hf_checkpoint}", bad) from bad
        return [
            Task(
                prompt=own["prompt"],
                prompt_ids=ids.copy(),
                label=own.get("label"),
                metadata=own.get("metadata") or {},
                sampling=dict(leased.sampling),
                group=leased.group,
                dataset=leased.dataset,
                index=i,
            )
            for i, own in enumerate(prompts)
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
        if self.hook is None or (is_eval and self.engines is not None and self.config.algorithm.is_supervised):
            assert self.engines is not None  # config/field_rules.py: without an engine there is a hook
            return await self.engines.sample(tasks, begun)
        calls = [asyncio.ensure_future(self._call_hook(self.hook, task)) for task in tasks]
        try:
            return [response for made in await asyncio.gather(*calls) for response in made]
        finally:  # one failed, and the group with it, or the group was cancelled: the others stop sampling
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    async def _call_hook(self, hook: Plugin, task: Task) -> list[Response]:
        engines = HookEngines(self.engines) if self.engines is not None else None
        offered = {"task": task, "engines": engines, "tokenizer": self.tokenizer}
        wanted = {name: offered[name] for name in self.hook_arguments}
        made = await hook(named=wanted, passes=engines.errors if engines else ())
        made = [made] if isinstance(made, Response) else made
        if not isinstance(made, list | tuple) or not made or not all(isinstance(r, Response) for r in made):
            raise PluginError(f"{hook.name} gave {type(made).__name__}", "expected a Response or a list of them")
        self._check(hook.name, made)
        return list(made)

    def _check(self, name: str, responses: Sequence[Response]) -> None:
        """Every field is what it should be, or what `name` names made it so."""
        for response in responses:
            try:
                normalise(response, self.vocab_size)
            except Exception as bad:  # an attribute of a plug-in's own class may raise anything
                raise PluginError(f"{name} gave a Response that cannot be used", text_of(bad)) from bad

    def _fill_text(self, responses: list[Response]) -> None:
        blank = [r for r in responses if not r.text]
        if not blank:
            return
        for response, text in zip(blank, self.tokenizer.decode_batch([r.token_ids for r in blank]), strict=True):
            response.text = _without_stop(text, response)


def _without_stop(text: str, response: Response) -> str:
    """As SGLang's own text: without the stop string that ended it, and what follows that."""
    stop = response.task.sampling.get("stop") or []
    found = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop)] if response.finish_reason == "stop" else []
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _arguments_of(hook: Plugin) -> tuple[str, ...]:
    """Those of HOOK_ARGUMENTS that it takes. Raises HookError when it cannot be called with them by name."""
    signature = hook.signature()
    if signature is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return HOOK_ARGUMENTS
    for name, parameter in signature.parameters.items():
        if name not in HOOK_ARGUMENTS:
            raise HookError(f"{hook.name}: unknown argument {name!r}; it may take {', '.join(HOOK_ARGUMENTS)}")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise HookError(f"{hook.name}: {name!r} can only be given by position; arguments are given by name")
    return tuple(signature.parameters)

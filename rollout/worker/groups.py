"""One leased group, from its prompt to its samples: generate, reward, filter."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollout.engines.dispatch import Dispatch
from rollout.rewards.registry import find
from rollout.rewards.scoring import Reward
from rollout.samples import partials
from rollout.samples.generate_hook import TEARDOWN_S, GenerateHook
from rollout.samples.plugins import Plugin, PluginError, failure
from rollout.samples.response import Response, Task, normalise, to_sample
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from rollout.samples.worker_hooks import WorkerHooks
from slimebus.bus.errors import ProtocolError, SlimebusError
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample, decode_group, encode_group
from slimebus.config.dynamic_filter import is_reward_spread
from slimebus.config.schema import RunConfig
from slimebus.process.hooks import text_of
from slimebus.telemetry.spans import Spans

log = logging.getLogger("rollout")

Begun = list[Response] | None
OnSampled = Callable[[], Awaitable[None]]
RECALL_S = 10.0
"""How long an engine may take to end what it makes of a group."""


class Dropped(Exception):
    """The dynamic filter wants this group replaced; the text is the reason, num_tokens what was made for nothing."""

    def __init__(self, text: str, num_tokens: int, rewards: list[float | None]) -> None:
        super().__init__(text)
        self.num_tokens, self.rewards = num_tokens, rewards


def _extras_of(last: Response, response: Response) -> dict[str, np.ndarray]:
    """Those of a trajectory's last context, for an earlier one: the same, but zeros for what is one value a token."""
    lengths = [len(one.prompt_ids if one.prompt_ids is not None else []) + len(one.token_ids) for one in (last, response)]
    extras = {name: np.asarray(array) for name, array in last.extras.items()}
    for name, array in extras.items():
        if array.shape[:1] == (lengths[0],):
            extras[name] = np.zeros_like(array, shape=(lengths[1], *array.shape[1:]))
    return extras


class GroupMaker:
    """Makes the samples of groups as the config says; hooks and rewards are loaded, and so checked, at construction."""

    def __init__(
        self,
        config: RunConfig,
        base: Path,
        tokenizer: Tokenizer,
        engines: Dispatch | None,
        *,
        vocab_size: int | None = None,
        max_context_len: int = 0,
    ) -> None:
        """vocab_size, max_context_len: the model's; token ids of hooks are below the one, samples at most as long as the other (0: any)."""
        self.config, self.tokenizer, self.engines, self.vocab_size = config, tokenizer, engines, vocab_size
        self.max_context_len = config.rollout.rollout_max_context_len or max_context_len
        self.spans = Spans()
        r = config.rollout
        self.reward = Reward(find(r, base))
        self.eval_rewards = {name: Reward(find(r, base, d)) for name, d in config.eval.datasets.items() if d.rm_type or d.custom_rm_path}
        path = r.custom_generate_function_path
        self.hook = GenerateHook(path, base) if path else None
        if r.environment:
            from rollout.environment import Environment

            self.hook = GenerateHook.of(f"environment {r.environment}", Environment(r.environment, base))
        self.hooks = WorkerHooks(r.hooks_path, base, r.reward_timeout_s) if r.hooks_path else None
        self._hooks = [*([self.hook] if self.hook else []), *([self.hooks.life] if self.hooks else [])]
        self.is_strict = False
        """True: one sample without a reward fails its group."""
        path = r.dynamic_sampling_filter_path
        self.keep = Plugin.load("dynamic filter", path, base, ["samples"]) if path and not is_reward_spread(path) else None

    async def setup(self) -> None:
        """Before the first group. Raises PluginError when the `setup` of a hook fails."""
        for hook in self._hooks:
            await hook.setup()

    async def teardown(self) -> None:
        """After the last; what goes wrong in the `teardown` of a hook is logged."""
        for hook in self._hooks:
            try:
                await hook.teardown()
            except (PluginError, TimeoutError) as bad:
                log.warning("%s", getattr(bad, "text", f"the teardown of {hook.plugin.name} took longer than {TEARDOWN_S:g} s"))

    async def make(
        self, leased: LeasedGroup, record: bytes, partial: Sequence[Any] = (), on_sampled: OnSampled = lambda: asyncio.sleep(0)
    ) -> list[Sample]:
        """The group's samples, continuing the frames of `partial`; on_sampled is awaited when engines have no more to do for it.

        Raises Dropped when the filter refuses them; Unfinished when the worker leaves, the group is recalled, or sampling takes longer
        than generate_timeout_s; TimeoutError instead of the last where samples cannot be continued; SlimebusError when it cannot be
        made: PluginError for whatever a plug-in or the chat template did.
        """
        tasks = self._tasks(leased, record)
        self._check_length(leased, len(tasks[0].prompt_ids))
        begun = self._begun(tasks, partial)
        sessions = [Session(task, self.engines, self.tokenizer, max_context_len=self.max_context_len) for task in tasks]
        with self.spans("generate", group=leased.group) as span:
            made = await self._generate(sessions, begun, on_sampled, is_eval=leased.kind == "eval")
            if self.hook is not None:
                span.about["turns"] = [[(round(at - span.begin, 6), round(s, 6)) for at, s in session.turns] for session in sessions]
        if begun and self.config.rollout.mask_offpolicy_in_partial_rollout:
            for responses in made:
                partials.mask_older(responses[-1], leased.version)
        reward = self.eval_rewards.get(leased.dataset, self.reward) if leased.kind == "eval" else self.reward
        if self.hooks is not None:
            for response in itertools.chain(*made):
                await self.hooks.call("after_generate", response)
                self._check(self.hooks.life.plugin.name, [response])
        with self.spans("reward", group=leased.group):
            problems = await reward.score([responses[-1] for responses in made])
        for problem in {p.alike: p for p in problems if p is not None}.values():
            log.warning("group %s: %s", leased.group, problem.text)
        if (wrong := list(filter(None, problems))) and (self.is_strict or (len(wrong) == len(problems) and leased.kind == "train")):
            raise wrong[0]
        samples = []
        for responses, unrewarded in zip(made, problems, strict=True):
            for response in responses:  # what a session began is worth what came of it
                response.reward, response.extras = responses[-1].reward, _extras_of(responses[-1], response) | response.extras
            self._check(reward.name, responses)
            samples += [to_sample(response, failed=unrewarded is not None) for response in responses]
        is_kept = leased.kind != "train" or await self._is_kept(samples)
        if self.hooks is not None:
            await self.hooks.after_reward(samples, is_kept=is_kept, dataset=leased.dataset)
        if not is_kept:
            raise Dropped("filtered", sum(len(sample.tokens) for sample in samples), [sample.reward for sample in samples])
        return samples

    def _check_length(self, leased: LeasedGroup, num_tokens: int) -> None:
        most = self.config.rollout.rollout_max_prompt_len
        if 0 < most < num_tokens and leased.kind == "train":
            raise Dropped(f"a prompt of {num_tokens} tokens, above rollout_max_prompt_len", 0, [])

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

    def _begun(self, tasks: list[Task], partial: Sequence[Any]) -> Begun:
        if not partial or self.hook is not None:
            return None
        try:
            return partials.begun(tasks, partial)
        except ProtocolError as bad:
            log.warning("%s; sampling it from its prompt", bad.text)
            return None

    async def _generate(self, sessions: list[Session], begun: Begun, on_sampled: OnSampled, *, is_eval: bool) -> list[list[Response]]:
        """The samples of each session, in time."""
        group = sessions[0].task.group
        hook = (is_eval and self.hooks and self.hooks.evaluate) or self.hook
        is_plain = hook is None or (is_eval and hook is self.hook and self.engines is not None and self.config.algorithm.is_supervised)
        turn = self._turn(sessions, begun, on_sampled) if hook is None or is_plain else self._call_hook(hook, sessions, on_sampled)
        work = asyncio.ensure_future(turn)
        limit_s = self.config.rollout.generate_timeout_s
        try:
            await asyncio.wait({work}, timeout=limit_s)
            while not work.done() and self.engines is not None and self.engines.is_waiting(group):
                await asyncio.wait({work}, timeout=limit_s)  # queueing is not sampling: its time begins again
            if is_late := not work.done() and is_plain and not is_eval:
                await self.recall(group)
                await asyncio.wait({work}, timeout=RECALL_S)
            if not work.done():
                raise TimeoutError(f"no result within generate_timeout_s = {limit_s:g} s")
            return await work
        except partials.Unfinished as unfinished:
            if is_late:
                unfinished.num_new = unfinished.num_tokens - sum(len(response.token_ids) for response in begun or [])
            raise
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def recall(self, group: str) -> None:
        """End the sampling of a group whose samples can be continued: `make` raises Unfinished with what there is."""
        assert self.engines is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECALL_S):
                await self.engines.recall(group)

    async def _turn(self, sessions: list[Session], begun: Begun, on_sampled: OnSampled) -> list[list[Response]]:
        """The first turn of each session, in one request of the engine. begun: what there is of these turns already."""
        assert self.engines is not None  # config/field_rules.py: without an engine there is a hook
        requests = [session.request() for session in sessions]
        tasks = [request for request in requests if request is not None]
        made = await self.engines.sample(tasks, begun) if len(tasks) == len(sessions) else [session.cut_off() for session in sessions]
        await on_sampled()
        for session, response in zip(sessions, made, strict=True):
            session.take(response)
        return [session.responses() for session in sessions]

    async def _call_hook(self, hook: GenerateHook, sessions: list[Session], on_sampled: OnSampled) -> list[list[Response]]:
        calls = [asyncio.ensure_future(hook(session)) for session in sessions]
        try:
            made = [responses for of_session in await asyncio.gather(*calls) for responses in of_session]
        finally:  # one failed, and the group with it, or the group was cancelled: the others stop sampling
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        await on_sampled()
        for responses in made:
            self._check(hook.plugin.name, responses)
        return made

    def _check(self, name: str, responses: Sequence[Response]) -> None:
        """Every field is what it should be, or what `name` names made it so."""
        for response in responses:
            try:
                normalise(response, self.vocab_size)
            except Exception as bad:  # an attribute of a plug-in's own class may raise anything
                raise PluginError(f"{name} gave a Response that cannot be used", text_of(bad)) from bad

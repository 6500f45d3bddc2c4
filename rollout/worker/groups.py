"""One leased group, from its prompt to its samples: generate, reward, filter.

A session that fails or is late, and a response without a reward, is a failed sample; only when all of a group fail does the group.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollout.engines.dispatch import Dispatch
from rollout.rewards.pool import Reward, find_reward
from rollout.samples import partials
from rollout.samples.plugins import Plugin, PluginError, failure
from rollout.samples.response import EngineError, Response, Task, normalise, to_sample
from rollout.samples.session import Session
from rollout.samples.tokenizer import Tokenizer
from rollout.samples.worker_hooks import TEARDOWN_S, GenerateHook, WorkerHooks
from slimebus.bus.errors import ProtocolError, SlimebusError
from slimebus.bus.messages import LeasedGroup
from slimebus.bus.samples import Sample, decode_group, encode_group
from slimebus.config.schema import RunConfig, is_reward_spread
from slimebus.hooks.hooks import text_of
from slimebus.telemetry.spans import Spans

log = logging.getLogger("rollout")

Begun = list[Response] | None
OnSampled = Callable[[], Awaitable[None]]
RECALL_S = 10.0
"""How long an engine may take to end what it makes of a group."""
REWARD_PAUSES_S = (1.0, 5.0)
"""Before rewards that failed for all of a training group are tried again: a judge that is restarted costs no samples."""


class Trajectory(NamedTuple):
    """The contexts of one session; the last is rewarded; problem: why it is a failed sample."""

    responses: list[Response]
    problem: PluginError | None = None


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
        self.reward = Reward(find_reward(r, base))
        self.eval_rewards = {
            name: Reward(find_reward(r, base, d)) for name, d in config.eval.datasets.items() if d.rm_type or d.custom_rm_path
        }
        path = r.custom_generate_function_path
        self.hook = GenerateHook(path, base) if path else None
        if r.environment:
            from rollout.environment import Environment

            self.hook = GenerateHook.of(f"environment {r.environment}", Environment(r.environment, base))
        self.hooks = WorkerHooks(r.hooks_path, base, r.reward_timeout_s) if r.hooks_path else None
        self._hooks = [*([self.hook] if self.hook else []), *([self.hooks.life] if self.hooks else [])]
        self._set_up: list[GenerateHook] = []
        self.is_strict = False
        """True: one sample without a reward fails its group."""
        path = r.dynamic_sampling_filter_path
        self.keep = Plugin.load("dynamic filter", path, base, ["samples"]) if path and not is_reward_spread(path) else None

    async def setup(self) -> None:
        """Before the first group. Raises PluginError when the `setup` of a hook fails."""
        for hook in self._hooks:
            await hook.setup()
            self._set_up.append(hook)

    async def teardown(self) -> None:
        """After the last, of those that were set up; what goes wrong is logged."""
        for hook in self._set_up:
            try:
                await hook.teardown()
            except (PluginError, TimeoutError) as bad:
                log.warning("%s", getattr(bad, "text", f"the teardown of {hook.plugin.name} took longer than {TEARDOWN_S:g} s"))

    async def make_group(
        self, leased: LeasedGroup, record: bytes, partial: Sequence[Any] = (), on_sampled: OnSampled = lambda: asyncio.sleep(0)
    ) -> list[Sample]:
        """The group's samples, continuing the frames of `partial`; on_sampled is awaited when engines have no more to do for it.

        Raises Dropped when the filter refuses them; Unfinished when the worker leaves, the group is recalled, or sampling takes longer
        than generate_timeout_s; SlimebusError when it cannot be made: PluginError for anything that a plug-in or the chat template raised.
        """
        tasks = self._tasks(leased, record)
        self._check_length(leased, len(tasks[0].prompt_ids))
        begun = self._decode_partial(tasks, partial)
        sessions = [Session(task, self.engines, self.tokenizer, max_context_len=self.max_context_len) for task in tasks]
        with self.spans("generate", group=leased.group) as span:
            made = await self._generate(sessions, begun, on_sampled, is_eval=leased.kind == "eval")
            if self.hook is not None:
                span.about["turns"] = [[(round(at - span.begin, 6), round(s, 6)) for at, s in session.turns] for session in sessions]
        if begun and self.config.rollout.mask_offpolicy_in_partial_rollout:
            for one in made:
                partials.mask_older(one.responses[-1], leased.version)
        if self.hooks is not None:
            for response in [response for one in made if one.problem is None for response in one.responses]:
                await self.hooks.call("after_generate", response)
                self._check_responses(self.hooks.life.plugin.name, [response])
        with self.spans("reward", group=leased.group):
            made = await self._rewarded(made, leased)
        samples = self._samples(made)
        is_kept = leased.kind != "train" or await self._is_kept(samples)
        if self.hooks is not None:
            await self.hooks.after_reward(samples, tasks[0], is_kept=is_kept)
        if not is_kept:
            raise Dropped("filtered", sum(len(sample.tokens) for sample in samples), [sample.reward for sample in samples])
        return samples

    async def _rewarded(self, made: list[Trajectory], leased: LeasedGroup) -> list[Trajectory]:
        """The same with their rewards, or what kept them from one. Raises PluginError where a training group would have none."""
        reward = self.eval_rewards.get(leased.dataset, self.reward) if leased.kind == "eval" else self.reward
        for pause_s in (*REWARD_PAUSES_S, None):
            problems = iter(await reward.score([one.responses[-1] for one in made if one.problem is None]))
            scored = [one if one.problem is not None else one._replace(problem=next(problems)) for one in made]
            failed = {one.problem.alike: one.problem for one in scored if one.problem is not None}
            if pause_s is None or self.is_strict or leased.kind != "train" or any(one.problem is None for one in scored):
                break
            log.warning("group %s: %s; tried again in %g s", leased.group, next(iter(failed.values())).text, pause_s)
            await asyncio.sleep(pause_s)
        if failed and (self.is_strict or (leased.kind == "train" and all(one.problem is not None for one in scored))):
            raise next(iter(failed.values()))
        for problem in failed.values():
            log.warning("group %s: %s", leased.group, problem.text)
        for one in scored:
            if one.problem is None:
                self._check_responses(reward.name, one.responses[-1:])
        return scored

    def _samples(self, made: list[Trajectory]) -> list[Sample]:
        """What a session began is worth what came of it. All samples of a group have the same extras, failed ones zeros."""
        samples, good = [], next((one.responses[-1] for one in made if one.problem is None), None)
        for responses, problem in made:
            last = responses[-1]
            for response in responses:
                response.reward = last.reward
                if problem is None:
                    response.extras = _extras_of(last, response) | response.extras
                else:
                    response.extras = {} if good is None else {k: np.zeros_like(a) for k, a in _extras_of(good, response).items()}
                samples.append(to_sample(response, failed=problem is not None))
        return samples

    def _check_length(self, leased: LeasedGroup, num_tokens: int) -> None:
        limits = {"rollout_max_prompt_len": self.config.rollout.rollout_max_prompt_len, "rollout_max_context_len": self.max_context_len}
        for name, most in limits.items():
            if 0 < most < num_tokens and leased.kind == "train":
                raise Dropped(f"a prompt of {num_tokens} tokens, above {name} = {most}", 0, [])

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
        """True for a group with samples that can be cut off and continued: the engine makes them, not a hook."""
        return leased.kind == "train" and self.takes_partials

    def _decode_partial(self, tasks: list[Task], partial: Sequence[Any]) -> Begun:
        if not partial or self.hook is not None:
            return None
        try:
            return partials.decode_partial(tasks, partial)
        except ProtocolError as bad:
            log.warning("%s; sampling it from its prompt", bad.text)
            return None

    async def _generate(self, sessions: list[Session], begun: Begun, on_sampled: OnSampled, *, is_eval: bool) -> list[Trajectory]:
        """What each session gives, in time."""
        hook = (is_eval and self.hooks and self.hooks.evaluate) or self.hook
        if hook is None or (is_eval and hook is self.hook and self.engines is not None and self.config.algorithm.is_supervised):
            return await self._sample(sessions, begun, on_sampled, is_eval=is_eval)
        calls = [asyncio.ensure_future(self._call_hook(hook, session)) for session in sessions]
        try:
            made = [one for of_session in await asyncio.gather(*calls) for one in of_session]
        finally:  # an engine failed, and the group with it, or the group was cancelled: the others stop sampling
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        problems = [one.problem for one in made if one.problem is not None]
        if problems and (self.is_strict or len(problems) == len(made)):
            raise problems[0]
        await on_sampled()
        return made

    async def _call_hook(self, hook: GenerateHook, session: Session) -> list[Trajectory]:
        """The samples of one session; of one that failed or is late what there is of it."""
        call = asyncio.ensure_future(hook(session))
        try:
            if not await self._is_in_time(call, session):
                raise PluginError(f"{hook.plugin.name} gave no result within generate_timeout_s = {self._limit_s:g} s")
            made = [Trajectory(responses) for responses in await call]
            for one in made:
                self._check_responses(hook.plugin.name, one.responses)
            return made
        except PluginError as bad:
            return [Trajectory(session.left_over(), bad)]
        finally:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    @property
    def _limit_s(self) -> float:
        return self.config.rollout.generate_timeout_s

    async def _is_in_time(self, work: "asyncio.Future[Any]", session: Session) -> bool:
        """Whether it is done within the time for sampling, which stands still while requests or the session wait for an engine or agent."""
        while not work.done() and (left_s := session.began_at + self._limit_s - time.monotonic()) > 0:
            await asyncio.wait({work}, timeout=left_s)
            if not work.done() and (session.is_waiting or self._is_queued(session.task.group)):
                session.began_at = time.monotonic()
        return work.done()

    def _is_queued(self, group: str) -> bool:
        return self.engines is not None and self.engines.is_waiting(group)

    async def _sample(self, sessions: list[Session], begun: Begun, on_sampled: OnSampled, *, is_eval: bool) -> list[Trajectory]:
        work = asyncio.ensure_future(self._sample_first_turn(sessions, begun, on_sampled))
        is_late = False
        try:
            if not await self._is_in_time(work, sessions[0]) and not is_eval:
                is_late = True
                await self.recall(sessions[0].task.group)
                await asyncio.wait({work}, timeout=RECALL_S)
            if not work.done():
                raise EngineError(f"no result within generate_timeout_s = {self._limit_s:g} s")
            return [Trajectory(responses) for responses in await work]
        except partials.Unfinished as unfinished:
            if is_late:
                unfinished.num_new = unfinished.num_tokens - sum(len(response.token_ids) for response in begun or [])
            raise
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def recall(self, group: str) -> None:
        """End the sampling of a group with samples that can be continued: `make_group` raises Unfinished with what there is."""
        assert self.engines is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECALL_S):
                await self.engines.recall(group)

    async def _sample_first_turn(self, sessions: list[Session], begun: Begun, on_sampled: OnSampled) -> list[list[Response]]:
        """The first turn of each session, in one request of the engine. begun: what there is of these turns already."""
        assert self.engines is not None  # config/field_rules.py: without an engine there is a hook
        requests = [session.request() for session in sessions]
        tasks = [request for request in requests if request is not None]
        made = await self.engines.sample(tasks, begun) if len(tasks) == len(sessions) else [session.cut_off() for session in sessions]
        await on_sampled()
        for session, response in zip(sessions, made, strict=True):
            session.record_turn(response)
        return [session.responses() for session in sessions]

    def _check_responses(self, name: str, responses: Sequence[Response]) -> None:
        """Every field is what it should be, or what `name` names made it so."""
        for response in responses:
            try:
                normalise(response, self.vocab_size)
            except Exception as bad:  # an attribute of a plug-in's own class may raise anything
                raise PluginError(f"{name} gave a Response that cannot be used", text_of(bad)) from bad

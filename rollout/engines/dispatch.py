"""Which engine a request goes to, and how it ends: by itself, or with all of its group.

A session stays with its engine, for that has the keys and values of its earlier turns; others go to the least busy one. An engine gets at
most engine.sglang_server_concurrency requests, and none while it is given new weights: they wait here, in order, and whenever an engine
changes only those wake that it has room for.
"""

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout.engines.engine import Requests
from rollout.engines.pool import EnginePool
from rollout.samples import partials
from rollout.samples.response import Completion, EngineError, Response, Task
from slimebus.bus.errors import SlimebusError, Unreachable, WeightsError
from slimebus.bus.messages import NO_VERSION

MAX_IDLE_ROUNDS = 10
NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", [])
MAX_SESSIONS = 65536
"""Whose engine is remembered; the longest idle ones are forgotten first."""


@dataclass(eq=False)
class Waiter:
    """Requests that wait for room at one engine, and then have it. engine: None once their group is recalled."""

    num_requests: int
    group: str
    session: str
    engine: "asyncio.Future[Requests | None]"


class Dispatch:
    """Samples from the engines of a pool."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        pool.on_change = self._deal
        self.tokens_made = 0
        self.is_leaving = False
        self._tokens_of: Counter[str] = Counter()
        self._recalled: set[str] = set()
        self._queues: dict[str, OrderedDict[Waiter, None]] = {}
        """By model, those that have waited longest first."""
        self._num_waiting: Counter[str] = Counter()
        self._engine_of_session: OrderedDict[str, Requests] = OrderedDict()
        self._ids = itertools.count()

    @property
    def lineage(self) -> str:
        """Of the policy's weights."""
        return self.pool.lineage

    @property
    def vocab_size(self) -> int | None:
        """The policy's."""
        return self.pool.vocab_size

    async def generate(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], *, group: str = "", session: str = "", model: str = ""
    ) -> list[Completion]:
        """One completion a prompt, all from one engine of this model (empty: the policy); `version_runs` gives their versions.

        A recalled group gets what there is, as aborted. Raises WeightsError or Unreachable when the engine lost its weights or ended,
        UsageError for a model that no engine has.
        """
        engine = await self._engine_for(len(prompts), group, session, model)
        if engine is None:
            return [NOTHING] * len(prompts)
        rids = [f"{self.pool.name}-{next(self._ids):012d}" for _ in prompts]  # equal length: SGLang aborts by prefix
        try:
            completions = await engine.generate(prompts, samplings, rids, group=group, session=session)
        except Unreachable:
            await self.pool.check_version(engine)
            raise
        finally:
            self._release(engine, len(prompts))
        if not engine.state.is_frozen and any(tag.rpartition(":")[0] != self.lineage for c in completions for tag, _, _ in c.versions):
            await self.pool.check_version(engine)
        num_tokens = sum(len(completion.output_ids) for completion in completions)
        self.tokens_made += num_tokens
        self._tokens_of[group] += num_tokens
        return completions

    async def _engine_for(self, num_requests: int, group: str, session: str, model: str) -> Requests | None:
        """Where they go, once it has room for them, which is taken then; None once the group is recalled."""
        while not (self.is_leaving or group in self._recalled):
            self._in_service(model)
            waiter = Waiter(num_requests, group, session, asyncio.get_running_loop().create_future())
            self._queues.setdefault(model, OrderedDict())[waiter] = None
            self._num_waiting[group] += 1
            self._deal(model)
            engine = None
            try:
                engine = await waiter.engine
                if engine is not None and engine.state.phase == "serving":
                    return engine
            except asyncio.CancelledError:
                engine = waiter.engine.result() if not waiter.engine.cancelled() else None
                if engine is not None:
                    self._release(engine, num_requests)
                raise
            finally:
                self._queues[model].pop(waiter, None)
                self._num_waiting[group] -= 1
                if not self._num_waiting[group]:
                    del self._num_waiting[group]
            if engine is not None:  # it is being given new weights now
                self._release(engine, num_requests)
        return None

    def _in_service(self, model: str) -> list[Requests]:
        """What may be asked for this model. Raises WeightsError where that is nothing, UsageError for a model that no engine has."""
        up: list[Requests] = [engine for engine in self.pool.engines_of(model) if engine.state.is_in_service]
        if not up and not model:
            raise WeightsError("every engine is out of service until its weights are whole again; the group is given back")
        if self.pool.router is not None and not model:  # it may ask any of them: none may be between two versions
            return [self.pool.router.target] if all(engine.state.phase == "serving" for engine in up) else []
        return up

    def _deal(self, *models: str) -> None:
        """Each engine of these models, or of all, gets the requests that it has room for, oldest first: none passes one that needs more."""
        limit = self.pool.config.engine.sglang_server_concurrency
        for queue, model in [(self._queues[model], model) for model in models or self._queues if self._queues[model]]:
            try:
                up = self._in_service(model)
            except SlimebusError:
                self._wake(queue)
                continue
            open_ = {engine for engine in up if engine.state.phase == "serving" and engine.running < limit}
            granted = []
            for waiter in queue:
                if not open_:
                    break
                engine = self._engine_of_session.get(waiter.session)
                if engine is None or engine not in up:
                    engine = min(up, key=lambda one: (one.state.phase != "serving", one.running))
                if engine not in open_ or waiter.engine.done():
                    continue
                if not engine.running or engine.running + waiter.num_requests <= limit:
                    engine.running += waiter.num_requests
                    self._remember(waiter.session, engine)
                    waiter.engine.set_result(engine)
                    granted.append(waiter)
                else:
                    open_.discard(engine)
                if engine.running >= limit:
                    open_.discard(engine)
            for waiter in granted:
                del queue[waiter]

    def _remember(self, session: str, engine: Requests) -> None:
        if session:
            self._engine_of_session[session] = engine
            self._engine_of_session.move_to_end(session)
            if len(self._engine_of_session) > MAX_SESSIONS:
                self._engine_of_session.popitem(last=False)

    def _release(self, engine: Requests, num_requests: int) -> None:
        engine.running -= num_requests
        self.pool.note_change()

    def _wake(self, waiters: Iterable[Waiter]) -> None:
        """These wait no more, and see for themselves why."""
        for waiter in waiters:
            if not waiter.engine.done():
                waiter.engine.set_result(None)

    def is_waiting(self, group: str) -> bool:
        """Whether requests of this group wait for room at an engine: nobody samples them yet."""
        return self._num_waiting[group] > 0

    def version_runs(self, completion: Completion, *, is_frozen: bool = False) -> list[tuple[int, int]]:
        """Runs (version, length) over its tokens. Raises WeightsError for weights that came from elsewhere."""
        if is_frozen:
            return [(NO_VERSION, len(completion.output_ids))]
        runs = []
        for tag, start, end in completion.versions:
            lineage, _, version = tag.rpartition(":")
            if lineage != self.lineage or not version.isdigit():
                text = f"an engine sampled with weights {tag!r}, expected lineage {self.lineage!r}; the group is given back"
                raise WeightsError(text, code="foreign_weights")
            runs.append((int(version), end - start))
        covered, num_tokens = sum(length for _, length in runs), len(completion.output_ids)
        if covered != num_tokens:
            raise WeightsError(f"an engine gave versions for {covered} of {num_tokens} tokens", code="foreign_weights")
        return runs

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        """One response to each task of a group, continuing those in `begun`. `text` is left to the caller.

        What an engine ended early (a weight update with pause mode `abort`) is continued by token id. Raises Unfinished once
        the group is recalled or `leave` was called.
        """
        made = begun or [partials.empty_response(task) for task in tasks]
        group, session, idle_rounds = tasks[0].group, tasks[0].session, 0
        while open_ := [i for i, response in enumerate(made) if response.finish_reason == "abort"]:
            if self.is_leaving or group in self._recalled:
                raise partials.Unfinished(made)
            prompts = [partials.prompt_of(made[i]).tolist() for i in open_]
            completions = await self.generate(prompts, [partials.sampling_of(made[i]) for i in open_], group=group, session=session)
            for i, completion in zip(open_, completions, strict=True):
                made[i] = partials.continue_response(made[i], completion, self.version_runs(completion))
            idle_rounds = 0 if any(len(c.output_ids) for c in completions) else idle_rounds + 1
            if idle_rounds >= MAX_IDLE_ROUNDS and not self.is_leaving:
                what = f"an engine ended the samples of group {group} {idle_rounds} times without making a token"
                raise EngineError(f"{what}; its log says why (no memory, a prompt that is too long)")
        return made

    async def recall(self, group: str) -> None:
        """End what is being sampled of this group: its callers get what there is, and nothing new is begun until `forget`."""
        self._recalled.add(group)
        self._wake(waiter for queue in self._queues.values() for waiter in queue if waiter.group == group)
        await self._abort(group)

    def forget(self, group: str) -> int:
        """The group may be sampled again; how many tokens were made of it."""
        self._recalled.discard(group)
        return self._tokens_of.pop(group, 0)

    async def leave(self) -> None:
        """End every sample being made; callers get what there is, and nothing new is begun."""
        self.is_leaving = True
        self._wake(itertools.chain.from_iterable(self._queues.values()))
        await self._abort(None)

    async def _abort(self, group: str | None) -> None:
        # One engine that cannot be reached keeps no other from handing over.
        await asyncio.gather(*(engine.abort(group) for engine in self.pool.request_targets), return_exceptions=True)

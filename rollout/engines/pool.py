"""The inference engines of a worker: started here or attached by URL, spoken to only through SGLang's HTTP API.

Generation goes to the engine with the fewest running requests; control and weight updates go to every one.
"""

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout import partials
from rollout.engines.claim import claim
from rollout.engines.client import Completion, EngineError
from rollout.engines.engine import SETTLE_S, Engine
from rollout.engines.process import embedded_engine
from rollout.engines.sglang import option_list, sglang_server
from rollout.response import Response, Task
from rollout.weights.model_shapes import check_shapes, shapes_of
from slimebus.bus.errors import SlimebusError, Unreachable, WeightsError
from slimebus.cli.config.schema import EngineConfig
from slimebus.model_folder import read_config, vocab_size
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

START_TIMEOUT_S = 1800.0
"""A large model is loaded and its CUDA graphs captured in minutes; an engine that ends earlier is noticed at once."""
MAX_RUNNING_REQUESTS = 256
"""Sequences that the embedded engine decodes at once."""
STOP_S = 2.0
LEAVE_POLL_S = 0.05
MAX_IDLE_ROUNDS = 10
RECOVERY_RETRY_S = 1.0
HALF = ("float16", "half")
HALF_IF_AUTO = (*HALF, "float32", None)
"""Dtypes of a model's config for which SGLang's `auto` is float16; None: it does not say."""
PROBE_S, PROBE_PAUSE_S, SILENT_PROBES = 5.0, 1.0, 6
"""An engine that answers none of so many probes in a row, 30 s, hangs: ours is killed and replaced, an attached one is out of service."""


class Engines:
    """All engines of one worker. `sample` makes responses; `update_weights` moves every engine to one version."""

    def __init__(self, config: EngineConfig, model_dir: Path, log_dir: Path, *, name: str, sglang_args: dict[str, Any], seed: int) -> None:
        self.config, self.model_dir, self.log_dir, self.name = config, model_dir, log_dir, name
        self.sglang_args, self.seed = sglang_args, seed
        self.engines: list[Engine] = []
        self.lineage = ""
        self.tokens_made = 0
        self.vocab_size = vocab_size(model_dir)
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._newest: SharedVersion | None = None
        self._recovering: dict[Engine, asyncio.Task[None]] = {}
        self._watching: list[asyncio.Task[None]] = []
        self._claims: list[socket.socket] = []
        self._ids = itertools.count()
        self._running: dict[str, tuple[str, Engine]] = {}
        self._recalled: set[str] = set()
        self.is_leaving = False
        self.on_lost: Callable[[], None] = lambda: None
        """Called when no engine has its weights any more, or one that was started here ended."""

    async def start(self) -> None:
        """Start or attach every engine, and wait until each is ready. Raises SlimebusError with the log's tail if one is not."""
        for url in self.config.engine_url:
            self._claims.append(await claim(url))
            self.engines.append(Engine(url.rstrip("/"), None, self.vocab_size, self.config))
        if not self.engines:
            self.engines.append(self._launch())
        for engine in self.engines:
            await self._enlist(engine)

    async def _watch(self, engine: Engine) -> None:
        """See that it runs and answers, until it is replaced."""
        silent = 0
        while engine in self.engines:
            asked_at = time.monotonic()
            if engine.is_dead:
                self.on_lost()
            silent = 0 if await engine.client.answers(PROBE_S) else silent + 1
            # Where another engine has the version already it goes on now, and this one later.
            holds_up = engine.is_updating and self._newest is not None and any(e.weights.serves(self._newest) for e in self.engines)
            if silent >= SILENT_PROBES or (silent and holds_up):
                await self._give_up(engine, is_hung=silent >= SILENT_PROBES)
            await asyncio.sleep(max(0.0, asked_at + PROBE_PAUSE_S - time.monotonic()))

    async def _give_up(self, engine: Engine, *, is_hung: bool) -> None:
        if engine.process is not None:
            if is_hung and not engine.is_dead:
                log.error("engine at %s has not answered for %.0f s; killing it", engine.url, PROBE_S * SILENT_PROBES)
                await asyncio.to_thread(engine.process.stop, STOP_S)
            return
        if not engine.weights.is_out_of_service or engine.is_updating:
            log.error("engine at %s does not answer; it is out of service until it does", engine.url)
            engine.take_out_of_service()
            self._report_lost()

    def _launch(self) -> Engine:
        log_file = self.log_dir / f"engine-{self.name}.log"
        api_key = self.config.engine_api_key or secrets.token_urlsafe(24)  # other users of this host may not use or change it
        if self.config.engine == "sglang":
            arguments = option_list(self.sglang_args)
            process = sglang_server(self.model_dir, log_file, python=self.config.engine_python, arguments=arguments, api_key=api_key)
        else:
            options = {"max_running_requests": MAX_RUNNING_REQUESTS, "threads": self.config.engine_threads, "seed": self.seed}
            process = embedded_engine(self.model_dir, log_file, arguments=option_list(options), api_key=api_key)
        process.start()
        log.info("started engine %s at %s (log: %s)", self.config.engine, process.url, log_file)
        return Engine(process.url, process, self.vocab_size, self.config)

    async def _enlist(self, engine: Engine) -> None:
        """Wait until it is ready, and watch it from then on."""
        if engine.process is not None:
            await engine.process.wait_ready(START_TIMEOUT_S)
        else:
            await engine.client.wait_ready(START_TIMEOUT_S)
            await self._note_dtype(engine)
        self._watching.append(asyncio.create_task(self._watch(engine)))

    async def _note_dtype(self, engine: Engine) -> None:
        """Say so when an engine that others started computes in a dtype with a smaller range than published weights have."""
        try:
            dtype = str((await engine.client.server_info()).get("dtype"))
        except SlimebusError:  # an update asks it again, and says what is wrong
            return
        config = read_config(self.model_dir)
        if dtype in HALF or (dtype == "auto" and (config.get("dtype") or config.get("torch_dtype")) in HALF_IF_AUTO):
            log.warning(
                "engine at %s computes in float16, and what the trainer publishes is bfloat16: large values become infinite, small ones 0; "
                "start it with --dtype bfloat16", engine.url
            )  # fmt: skip

    async def restart_dead(self) -> bool:
        """Start again each engine that ended; True if there was one (its weights must be updated before use)."""
        dead = [i for i, engine in enumerate(self.engines) if engine.is_dead]
        for i in dead:
            log.error("engine at %s ended; starting another", self.engines[i].url)
            await self.engines[i].close()
            self.engines[i] = self._launch()
            await self._enlist(self.engines[i])
        return bool(dead)

    async def update_weights(self, version: SharedVersion) -> None:
        """Engines serve exactly this version, or WeightsError: then none of them may be used until a later update.

        One that fails where others succeed is out of service; it is tried again in the background, and gets everything. Engines that have
        the version already, since an earlier try failed for others, are not touched.
        """
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(shapes_of, self.model_dir)
        check_shapes(version, self._shapes, self.model_dir)
        self._newest = version
        asked = [engine for engine in self.engines if not engine.weights.is_out_of_service] or self.engines
        outcomes = await asyncio.gather(*(engine.update(version) for engine in asked), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if len(failures) == len(asked) or not isinstance(failure, SlimebusError):
                raise failure
            log.warning("weights: %s; this engine is out of service, the others serve version %d", failure.text, version.version)
        self.lineage = version.lineage
        self._begin_recovery()

    def _begin_recovery(self) -> None:
        for engine in self.engines:
            if engine.weights.is_out_of_service and engine not in self._recovering:
                self._recovering[engine] = asyncio.create_task(self._recover(engine))

    async def _recover(self, engine: Engine) -> None:
        """Bring an engine to the newest version, however long it takes."""
        said = ""
        try:
            while self._newest is not None and not engine.weights.serves(self._newest):
                await asyncio.sleep(RECOVERY_RETRY_S)
                try:
                    await engine.update(self._newest)
                except SlimebusError as bad:
                    if bad.text != said:
                        log.warning("engine at %s stays out of service: %s", engine.url, bad.text)
                    said = bad.text
            log.info("engine at %s is in service again", engine.url)
        finally:
            del self._recovering[engine]

    async def _generate(self, begun: list[Response]) -> list[Completion]:
        """What continues each of these, from the least busy engine; `leave` may end them, and what they have comes back."""
        engine = min(self.engines, key=lambda e: (e.weights.is_out_of_service, e.running))
        if engine.weights.is_out_of_service:
            self.on_lost()  # again, should it have been lost just when its last update was done
        rids = [f"{self.name}-{next(self._ids):012d}" for _ in begun]  # equal length: SGLang aborts by prefix
        self._running |= dict.fromkeys(rids, (begun[0].task.group, engine))
        prompts, samplings = [partials.prompt_of(one).tolist() for one in begun], [partials.sampling_of(one) for one in begun]
        try:
            completions = await engine.generate(prompts, samplings, rids)
        except Unreachable:
            await self._report_if_lost(engine)
            raise
        finally:
            for rid in rids:
                del self._running[rid]
        if any(tag.rpartition(":")[0] != self.lineage for completion in completions for tag, _, _ in completion.versions):
            await self._report_if_lost(engine)
        self.tokens_made += sum(len(c.output_ids) for c in completions)
        return completions

    async def _report_if_lost(self, engine: Engine) -> None:
        """An engine that was lost gets its weights again: beside the others, or, when it was the last, before anything is sampled."""
        if await engine.take_out_if_lost():
            self._report_lost()

    def _report_lost(self) -> None:
        if all(engine.weights.is_out_of_service for engine in self.engines):
            self.on_lost()
        else:
            self._begin_recovery()

    async def settle(self) -> None:
        """Before the worker leaves: updates under way may end, and no attached engine stays paused by one that does not."""
        updating = [engine for engine in self.engines if engine.is_updating]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(engine.is_updating for engine in updating):
                    await asyncio.sleep(LEAVE_POLL_S)

    async def unpause(self) -> None:
        """No attached engine stays paused, also one whose update was cut off."""
        await self._cancel([*self._recovering.values(), *self._watching])
        await asyncio.gather(*(engine.unpause() for engine in self.engines))

    async def leave(self) -> None:
        """End every sample being made by `sample`, whose callers get Unfinished with what there is; nothing new is begun."""
        self.is_leaving = True
        await self._abort(None)

    async def recall(self, group: str) -> None:
        """End what is being sampled of this group: its callers get what there is, and nothing new is begun until `forget`."""
        self._recalled.add(group)
        await self._abort(group)

    def forget(self, group: str) -> None:
        """The group may be sampled again."""
        self._recalled.discard(group)

    async def _abort(self, group: str | None) -> None:
        # A request that arrives at the engine while this goes out is ended by another round.
        while running := [(rid, engine) for rid, (of, engine) in self._running.items() if group in (None, of)]:
            # One engine that cannot be reached keeps no other from handing over.
            await asyncio.gather(*(engine.client.abort(rid) for rid, engine in running), return_exceptions=True)
            await asyncio.sleep(LEAVE_POLL_S)

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        """One response to each task of a group, continuing those in `begun`. `text` is left to the caller.

        What an engine ended early (a weight update with pause mode `abort`) is continued by token id. Raises Unfinished once
        the group is recalled or `leave` was called.
        """
        made = begun or [partials.empty(task) for task in tasks]
        idle_rounds = 0
        while open_ := [i for i, response in enumerate(made) if response.finish_reason == "abort"]:
            if self.is_leaving or tasks[0].group in self._recalled:
                raise partials.Unfinished(made)
            completions = await self._generate([made[i] for i in open_])
            for i, completion in zip(open_, completions, strict=True):
                made[i] = partials.continued(made[i], completion, self._versions(completion))
            idle_rounds = 0 if any(len(c.output_ids) for c in completions) else idle_rounds + 1
            if idle_rounds >= MAX_IDLE_ROUNDS and not self.is_leaving:
                raise EngineError(
                    f"an engine ended the samples of group {tasks[0].group} {idle_rounds} times without making a token; "
                    "its log says why (no memory, a prompt that is too long)"
                )
        return made

    def _versions(self, completion: Completion) -> list[tuple[int, int]]:
        """Runs (version, length) over its tokens. Raises WeightsError for weights that came from elsewhere."""
        runs = []
        for tag, start, end in completion.versions:
            lineage, _, version = tag.rpartition(":")
            if lineage != self.lineage or not version.isdigit():
                raise WeightsError(
                    f"an engine sampled with weights {tag!r}, expected lineage {self.lineage!r}; the group is given back",
                    code="foreign_weights",
                )
            runs.append((int(version), end - start))
        covered, num_tokens = sum(length for _, length in runs), len(completion.output_ids)
        if covered != num_tokens:
            raise WeightsError(f"an engine gave versions for {covered} of {num_tokens} tokens", code="foreign_weights")
        return runs

    async def stop(self) -> None:
        """Close the clients and end the processes that were started here, for certain."""
        await self._cancel([*self._recovering.values(), *self._watching])
        await asyncio.gather(*(engine.close() for engine in self.engines))
        for claimed in self._claims:
            claimed.close()
        processes = [engine.process for engine in self.engines if engine.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop, STOP_S) for process in processes))

    @staticmethod
    async def _cancel(tasks: list["asyncio.Task[None]"]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

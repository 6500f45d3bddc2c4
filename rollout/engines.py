"""The inference engines of a worker: started here or attached by URL, spoken to only through SGLang's HTTP API.

Generation goes to the engine with the fewest running requests; control and weight updates go to every one.
"""

import asyncio
import itertools
import json
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rollout import handoff, partials
from rollout.engine_claim import claim
from rollout.engine_process import EngineProcess, embedded_engine
from rollout.engine_weights import EngineWeights
from rollout.model_shapes import check_shapes, shapes_of
from rollout.response import Response, Task
from rollout.sglang_client import Completion, EngineClient, EngineError
from rollout.sglang_server import option_list, sglang_server
from slimebus.config.schema import EngineConfig
from slimebus.errors import SlimebusError, Unreachable, UsageError, WeightsError
from slimebus.weights.shared_version import SharedVersion

log = logging.getLogger("rollout")

STOP_S = 2.0
LEAVE_POLL_S = 0.05
MAX_IDLE_ROUNDS = 10
ABORT_TIMEOUT_S = 5.0
MEND_RETRY_S = 1.0
HALF = ("float16", "half")
HALF_IF_AUTO = (*HALF, "float32", "None")
"""Dtypes of a model's config for which SGLang's `auto` is float16."""
OWN_RETRY_S, ATTACHED_RETRY_S = 3.0, 30.0
"""How long a lost connection is retried: our own engine on this host that does not answer has ended."""


def version_of(tag: str, lineage: str) -> int:
    """The version behind a tag of this lineage. Raises WeightsError for weights that came from elsewhere."""
    found, _, version = tag.rpartition(":")
    if found != lineage or not version.isdigit():
        raise WeightsError(
            f"an engine sampled with weights {tag!r}, expected lineage {lineage!r}; the group is given back", code="foreign_weights"
        )
    return int(version)


class Engine:
    """One engine: its client, the process if it was started here, what it serves, and what it is running."""

    def __init__(self, url: str, process: EngineProcess | None, vocab_size: int | None, config: EngineConfig) -> None:
        self.url, self.process, self.running = url, process, 0
        self.client = EngineClient(url, vocab_size=vocab_size, retry_s=ATTACHED_RETRY_S if process is None else OWN_RETRY_S)
        self.weights = EngineWeights(self.client, pause_mode=config.pause_mode, route=config.weight_route)
        self._calls: set[asyncio.Task[list[Completion]]] = set()
        self._updating = asyncio.Lock()

    @property
    def is_dead(self) -> bool:
        """True once the process that was started here has ended."""
        return self.process is not None and self.process.is_dead()

    async def update(self, version: SharedVersion) -> None:
        """The engine serves this version, or it serves nobody: then whatever it was running has ended too."""
        try:
            async with self._updating:
                await self.weights.update(version)
        except BaseException:
            self._end_calls()
            raise

    def _end_calls(self) -> None:
        for call in self._calls:
            call.cancel()

    async def is_lost(self) -> bool:
        """Whether it has other weights than it was given, or is gone: started again, say. It is out of service from then on."""
        if self._updating.locked() or self.weights.is_out_of_service:
            return self.weights.is_out_of_service
        async with self._updating:
            try:
                served = await self.client.weight_version(retry_s=0.0)
            except SlimebusError as bad:
                served = bad.text
            if served == self.weights.tag:
                return False
            log.warning("engine at %s: version %s was expected, found: %s; it is given everything anew", self.url, self.weights.tag, served)
            self.weights.lose()
            self._end_calls()
            return True

    async def generate(self, prompts: list[list[int]], samplings: list[dict[str, Any]], rids: list[str]) -> list[Completion]:
        """One completion a prompt. Raises WeightsError when the engine lost its weights meanwhile: what it made then is worth nothing."""
        self._check_service()
        call = asyncio.ensure_future(self.client.generate(prompts, samplings, rids, cache_key=self.weights.cache_key))
        self._calls.add(call)
        self.running += len(prompts)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            aborts = [asyncio.ensure_future(self.client.abort(rid)) for rid in rids]
            await asyncio.shield(asyncio.wait(aborts, timeout=ABORT_TIMEOUT_S))
            for abort in aborts:
                abort.cancel() if not abort.done() else abort.exception()
            if (task := asyncio.current_task()) is None or not task.cancelling():
                self._check_service()
            raise
        finally:
            self._calls.discard(call)
            self.running -= len(prompts)

    def _check_service(self) -> None:
        if self.weights.is_out_of_service:
            raise WeightsError(f"the engine at {self.url} is out of service until its weights are whole again; the group is given back")

    async def close(self) -> None:
        """Close the connections."""
        if self.weights.is_out_of_service and self.process is None:
            log.warning("engine at %s is left paused: an update of its weights failed, and none succeeded after it", self.url)
        await self.weights.close()
        await self.client.close()


class Engines:
    """All engines of one worker. `sample` makes responses; `update_weights` moves every engine to one version."""

    def __init__(self, config: EngineConfig, model_dir: Path, log_dir: Path, *, name: str, sglang_args: dict[str, Any], seed: int) -> None:
        self.config, self.model_dir, self.log_dir, self.name = config, model_dir, log_dir, name
        self.sglang_args, self.seed = sglang_args, seed
        self.engines: list[Engine] = []
        self.lineage = ""
        self.tokens_made = 0
        self.vocab_size, self._config_dtype = vocab_size(model_dir), dtype_of(model_dir)
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._newest: SharedVersion | None = None
        self._mending: dict[Engine, asyncio.Task[None]] = {}
        self._claims: list[socket.socket] = []
        self._ids = itertools.count()
        self._running: dict[str, Engine] = {}
        self.is_leaving = False
        self.on_lost: Callable[[], None] = lambda: None
        """Called when no engine has its weights any more."""

    async def start(self) -> None:
        """Start or attach every engine, and wait until each is ready. Raises SlimebusError with the log's tail if one is not."""
        handoff.sweep()
        for url in self.config.engine_url:
            self._claims.append(await claim(url))
            self.engines.append(Engine(url.rstrip("/"), None, self.vocab_size, self.config))
        if not self.engines:
            self.engines.append(self._launch())
        for engine in self.engines:
            await self._await_ready(engine)

    def _launch(self) -> Engine:
        log_file = self.log_dir / f"engine-{self.name}.log"
        if self.config.engine == "sglang":
            arguments = option_list(self.sglang_args)
            process = sglang_server(self.model_dir, log_file, python=self.config.engine_python, arguments=arguments)
        else:
            process = embedded_engine(self.model_dir, log_file, arguments=self._embedded_arguments())
        process.start()
        log.info("started engine %s at %s (log: %s)", self.config.engine, process.url, log_file)
        return Engine(process.url, process, self.vocab_size, self.config)

    def _embedded_arguments(self) -> tuple[str, ...]:
        c = self.config
        counts = {"--max-running-requests": c.engine_max_running_requests, "--threads": c.engine_threads, "--seed": self.seed}
        return tuple(str(word) for pair in counts.items() for word in pair)

    async def _await_ready(self, engine: Engine) -> None:
        if engine.process is not None:
            await engine.process.wait_ready(self.config.engine_start_timeout_s)
        else:
            await engine.client.wait_ready(self.config.engine_start_timeout_s)
            await self._note_dtype(engine)

    async def _note_dtype(self, engine: Engine) -> None:
        """Say so when an engine that others started computes in a dtype with a smaller range than published weights have."""
        try:
            dtype = str((await engine.client.server_info()).get("dtype"))
        except SlimebusError:  # an update asks it again, and says what is wrong
            return
        if dtype in HALF or (dtype == "auto" and self._config_dtype in HALF_IF_AUTO):
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
            await self._await_ready(self.engines[i])
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
        self._begin_mending()

    def _begin_mending(self) -> None:
        for engine in self.engines:
            if engine.weights.is_out_of_service and engine not in self._mending:
                self._mending[engine] = asyncio.create_task(self._mend(engine))

    async def _mend(self, engine: Engine) -> None:
        """Bring an engine to the newest version, however long it takes."""
        said = ""
        try:
            while self._newest is not None and not engine.weights.serves(self._newest):
                await asyncio.sleep(MEND_RETRY_S)
                try:
                    await engine.update(self._newest)
                except SlimebusError as bad:
                    if bad.text != said:
                        log.warning("engine at %s stays out of service: %s", engine.url, bad.text)
                    said = bad.text
            log.info("engine at %s is in service again", engine.url)
        finally:
            del self._mending[engine]

    async def generate(self, prompt_ids: np.ndarray, sampling: dict[str, Any], n: int) -> list[Completion]:
        """n completions of one prompt, from the least busy engine; running requests are aborted if the caller is cancelled."""
        return await self._generate([prompt_ids] * n, [sampling] * n)

    async def _generate(self, prompts: list[np.ndarray], samplings: list[dict[str, Any]], *, is_kept: bool = False) -> list[Completion]:
        """One completion of each prompt, from one engine. is_kept: `leave` may end them, and what they have comes back."""
        n = len(prompts)
        engine = min(self.engines, key=lambda e: (e.weights.is_out_of_service, e.running))
        if engine.weights.is_out_of_service:
            self.on_lost()  # again, should it have been lost just when its last update was done
        rids = [f"{self.name}-{next(self._ids):012d}" for _ in range(n)]  # equal length: SGLang aborts by prefix
        self._running |= dict.fromkeys(rids, engine) if is_kept else {}
        try:
            completions = await engine.generate([ids.tolist() for ids in prompts], samplings, rids)
        except Unreachable:
            await self._doubt(engine)
            raise
        finally:
            for rid in rids:
                self._running.pop(rid, None)
        if any(tag.rpartition(":")[0] != self.lineage for completion in completions for tag, _, _ in completion.versions):
            await self._doubt(engine)
        self.tokens_made += sum(len(c.output_ids) for c in completions)
        return completions

    async def _doubt(self, engine: Engine) -> None:
        """An engine that was lost gets its weights again: beside the others, or, when it was the last, before anything is sampled."""
        if not await engine.is_lost():
            return
        if all(other.weights.is_out_of_service for other in self.engines):
            self.on_lost()
        else:
            self._begin_mending()

    async def leave(self) -> None:
        """End every sample being made by `sample`, whose callers get Unfinished with what there is; nothing new is begun."""
        self.is_leaving = True
        # A request that arrives at the engine while this goes out is ended by another round.
        while self._running:
            await asyncio.gather(*(engine.client.abort(rid) for rid, engine in list(self._running.items())))
            await asyncio.sleep(LEAVE_POLL_S)

    async def sample(self, tasks: list[Task], begun: list[Response] | None = None) -> list[Response]:
        """One response to each task of a group, continuing those in `begun`. `text` is left to the caller.

        What an engine ended early (a weight update with pause mode `abort`) is continued by token id. Raises Unfinished once
        `leave` was called.
        """
        made = begun or [partials.empty(task) for task in tasks]
        idle_rounds = 0
        while open_ := [i for i, response in enumerate(made) if response.finish_reason == "abort"]:
            if self.is_leaving:
                raise partials.Unfinished(made)
            prompts, samplings = [partials.prompt_of(made[i]) for i in open_], [partials.sampling_of(made[i]) for i in open_]
            completions = await self._generate(prompts, samplings, is_kept=True)
            for i, completion in zip(open_, completions, strict=True):
                made[i] = partials.continued(made[i], self._response(tasks[i], completion))
            idle_rounds = 0 if any(len(c.output_ids) for c in completions) else idle_rounds + 1
            if idle_rounds >= MAX_IDLE_ROUNDS and not self.is_leaving:
                raise EngineError(
                    f"an engine ended the samples of group {tasks[0].group} {idle_rounds} times without making a token; "
                    "its log says why (no memory, a prompt that is too long)"
                )
        return made

    def _response(self, task: Task, completion: Completion) -> Response:
        ids = np.asarray(completion.output_ids, np.int32)
        runs = [(version_of(tag, self.lineage), end - start) for tag, start, end in completion.versions]
        covered = sum(length for _, length in runs)
        if covered != len(ids):
            raise WeightsError(f"an engine gave versions for {covered} of {len(ids)} tokens", code="foreign_weights")
        return Response(
            task=task,
            token_ids=ids,
            logprobs=np.asarray(completion.logprobs, np.float32),
            versions=runs,
            text="",
            finish_reason=completion.finish_reason,
        )

    async def stop(self) -> None:
        """Close the clients and end the processes that were started here, for certain."""
        for task in (mending := list(self._mending.values())):
            task.cancel()
        await asyncio.gather(*mending, return_exceptions=True)
        for engine in self.engines:
            await engine.close()
        for claimed in self._claims:
            claimed.close()
        processes = [engine.process for engine in self.engines if engine.process is not None]
        await asyncio.gather(*(asyncio.to_thread(process.stop, STOP_S) for process in processes))


def vocab_size(model_dir: Path) -> int | None:
    """Of the model's config; None when it does not say."""
    config = _config_of(model_dir)
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return int(found) if found else None


def dtype_of(model_dir: Path) -> str:
    """Of the model's config; "None" when it does not say, which SGLang takes for float32."""
    config = _config_of(model_dir)
    return str(config.get("dtype") or config.get("torch_dtype"))


def _config_of(model_dir: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((model_dir / "config.json").read_text())
    except FileNotFoundError:
        raise UsageError(f"{model_dir}: no config.json; model.hf_checkpoint must be a Hugging Face directory") from None
    return found

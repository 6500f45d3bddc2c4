"""The inference engines of a worker: started here or attached by URL, each watched, and started again or given its weights anew.

Which of them a request goes to is rollout/engines/dispatch.py's; which weights they have, rollout/weights/policy.py's.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

from rollout.engines.claim import claim
from rollout.engines.engine import ABORT_POLL_S, SETTLE_S, Engine
from rollout.engines.process import EngineProcess, embedded_engine
from rollout.engines.router import Router
from rollout.engines.sglang import option_list, sglang_server
from rollout.weights.policy import PolicyWeights, cancel
from slimebus.bus.errors import SlimebusError, UsageError
from slimebus.config.engine_plan import EngineSpec, engine_specs
from slimebus.config.model_folder import read_config, vocab_size
from slimebus.config.schema import RunConfig
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

START_TIMEOUT_S, ATTACH_TIMEOUT_S = 1800.0, 10.0
"""A large model is loaded and its CUDA graphs captured in minutes; an engine that ends earlier is noticed at once."""
MAX_RUNNING_REQUESTS = 256
"""Sequences that the embedded engine decodes at once."""
STOP_S = 2.0
RESTART_PAUSE_S = 5.0
HALF = ("float16", "half")
HALF_IF_AUTO = (*HALF, "float32", None)
"""Dtypes of a model's config for which SGLang's `auto` is float16; None: it does not say."""
PROBE_S, PROBE_PAUSE_S, SILENT_PROBES = 5.0, 1.0, 6
"""An engine that answers none of so many probes in a row, 30 s, hangs: ours is killed and replaced, an attached one is sick."""


class EnginePool:
    """All engines of one worker. `update_weights` moves those of the policy to one version."""

    def __init__(self, config: RunConfig, model_dir: Path, log_dir: Path, *, name: str, base: Path = Path()) -> None:
        """name: the worker's. base: the folder of the run.yaml."""
        self.config, self.model_dir, self.log_dir, self.name, self.base = config, model_dir, log_dir, name, base
        self.engines: list[Engine] = []
        self.vocab_size = vocab_size(model_dir)
        self.weights = PolicyWeights(model_dir)
        self._watching: dict[Engine, asyncio.Task[None]] = {}
        self._claims: dict[Engine, socket.socket] = {}
        self._changed, self._attaching = asyncio.Event(), asyncio.Lock()
        self.router: Router | None = None
        self.on_lost: Callable[[], None] = lambda: None
        """Called when no engine of the policy has its weights any more."""

    def of(self, model: str) -> list[Engine]:
        """The engines of a model; of the policy with an empty name. Raises UsageError when there is none."""
        found = [engine for engine in self.engines if (engine.model == model if model else not engine.is_frozen)]
        if not found:
            names = sorted({engine.model or "policy" for engine in self.engines})
            raise UsageError(f"no engine of model {model or 'policy'!r}; there are: {', '.join(names)}")
        return found

    @property
    def asked(self) -> list[Engine]:
        """Where requests may be: at the engines, or at the router."""
        return [*self.engines, *([self.router.target] if self.router is not None else [])]

    async def until_change(self) -> None:
        """Return once an engine changes its state, or ends a request."""
        await self._changed.wait()

    def note_change(self) -> None:
        """Whoever waits in `until_change` looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    # --- starting ---

    async def start(self) -> None:
        """Start every engine and wait until each is ready, or attach to those given, until one is. Raises SlimebusError."""
        urls = self.config.engine.engine_url
        for url in urls:
            await self._claim(url)
        for spec in () if urls else engine_specs(self.config, self.model_dir, self.base):
            process, config = self._launch(spec), self.config.engine
            size = vocab_size(spec.directory) if spec.is_frozen else self.vocab_size
            self.engines.append(Engine(process.url, process, size, config, spec=spec, on_change=self.note_change))
        first = [asyncio.create_task(self._enlist(engine)) for engine in self.engines]
        try:
            done, _ = await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED if urls else asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            self._watching |= {engine: task for engine, task in zip(self.engines, first, strict=True) if not task.done()}
        except BaseException:
            for task in first:
                task.cancel()
            raise
        if self.config.engine.use_router:
            log_file = self.log_dir / f"router-{self.name}.log"
            self.router = Router(self.config, log_file, lambda: self.of(""), self.vocab_size, on_change=self.note_change)
            await self.router.start()

    async def _claim(self, url: str) -> Engine:
        claimed = await claim(url)
        engine = Engine(url.rstrip("/"), None, self.vocab_size, self.config.engine, on_change=self.note_change)
        self.engines.append(engine)
        self._claims[engine] = claimed
        return engine

    def _launch(self, spec: EngineSpec) -> EngineProcess:
        engine = self.config.engine
        log_file = self.log_dir / f"engine-{self.name}{spec.suffix}.log"
        api_key = engine.engine_api_key or secrets.token_urlsafe(24)  # other users of this host may not use or change it
        if engine.engine == "sglang":
            python, arguments = engine.engine_python, option_list(spec.arguments)
            process = sglang_server(spec.directory, log_file, python=python, arguments=arguments, api_key=api_key, gpus=spec.gpus)
        else:
            options = {"max_running_requests": MAX_RUNNING_REQUESTS, "threads": engine.engine_threads, "seed": self.config.seed}
            process = embedded_engine(spec.directory, log_file, arguments=option_list(options), api_key=api_key)
        process.start()
        log.info("started engine %s at %s (log: %s)", engine.engine, process.url, log_file)
        return process

    async def _enlist(self, engine: Engine, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it is ready, and watch it from then on."""
        await engine.wait_ready(timeout_s)
        if engine.process is None:
            await self._note_dtype(engine)
        self._watching[engine] = asyncio.create_task(self._look_after(engine))

    async def _note_dtype(self, engine: Engine) -> None:
        """Say so when an engine that others started computes in a dtype with a smaller range than published weights have."""
        try:
            dtype = str((await engine.client.server_info()).get("dtype"))
        except SlimebusError:  # an update asks it again, and says what is wrong
            return
        config = read_config(self.model_dir)
        if dtype in HALF or (dtype == "auto" and (config.get("dtype") or config.get("torch_dtype")) in HALF_IF_AUTO):
            why = "what the trainer publishes is bfloat16: large values become infinite, small ones 0; start it with --dtype bfloat16"
            log.warning("engine at %s computes in float16, and %s", engine.url, why)

    # --- watching ---

    async def _look_after(self, engine: Engine) -> None:
        """See that it runs, answers and has its weights, until it is detached."""
        silent = 0
        while engine.state != "draining":
            asked_at = time.monotonic()
            if engine.is_dead:
                await self._start_again(engine)
            silent = 0 if await engine.client.answers(PROBE_S) else silent + 1
            # Where another engine has the version already it goes on now, and this one later.
            if silent >= SILENT_PROBES or (silent and self.weights.holds_up(engine, self.engines)):
                await self._give_up(engine, is_hung=silent >= SILENT_PROBES)
            if not silent and not engine.is_frozen:
                self.weights.recover(engine, self.engines)
            elif not silent and engine.state == "sick":
                engine.turn("serving")
            await asyncio.sleep(max(0.0, asked_at + PROBE_PAUSE_S - time.monotonic()))

    async def _give_up(self, engine: Engine, *, is_hung: bool) -> None:
        if engine.state != "sick" or engine.is_updating:
            log.error("engine at %s does not answer; it is out of service until it does", engine.url)
            engine.take_out_of_service()
            self.report_lost(engine)
        if is_hung and engine.process is not None and not engine.is_dead:
            log.error("engine at %s has not answered for %.0f s; killing it", engine.url, PROBE_S * SILENT_PROBES)
            await asyncio.to_thread(engine.process.stop, STOP_S)

    async def _start_again(self, engine: Engine) -> None:
        """Another process in the place of one that ended, however often that takes."""
        engine.take_out_of_service()
        self.report_lost(engine)
        while True:
            log.error("engine at %s ended; starting another", engine.url)
            await engine.close()
            process = self._launch(engine.spec)
            engine.connect(process.url, process)
            try:
                return await engine.wait_ready(START_TIMEOUT_S)
            except SlimebusError as bad:
                log.error("%s", bad.text)
                await asyncio.to_thread(process.stop, STOP_S)
                await asyncio.sleep(RESTART_PAUSE_S)

    def report_lost(self, engine: Engine) -> None:
        """This one is out of service: it gets its weights again beside the others, or, when it was the last, before anything is sampled."""
        if engine.is_frozen:
            return
        if any(other.is_up for other in self.of("")):
            self.weights.recover(engine, self.engines)
        else:
            self.on_lost()

    async def until_ready(self) -> None:
        """Return once an engine of the policy can be given weights."""
        while all(engine.state in ("starting", "draining") or engine.is_dead for engine in self.of("")):
            await asyncio.wait({asyncio.ensure_future(self.until_change())}, timeout=PROBE_PAUSE_S)

    async def update_weights(self, version: SharedVersion) -> None:
        """The policy's engines serve exactly this version, as PolicyWeights.update says."""
        await self.weights.update(self.of(""), version)
        for engine in self.of(""):
            self.weights.recover(engine, self.engines)

    # --- by command, while the worker works ---

    async def attach(self, url: str) -> str:
        """Take in an engine that runs; what it says of itself. Raises SlimebusError, with nothing changed, when it cannot be used."""
        async with self._attaching:  # of two commands for one engine the second finds it
            if any(engine.url == url.rstrip("/") for engine in self.engines):
                raise UsageError(f"{url} is an engine of this worker already")
            engine = await self._claim(url)
        try:
            about = await engine.client.server_info(retry_s=0.0)
            await self._enlist(engine, ATTACH_TIMEOUT_S)
        except BaseException:
            await self._remove(engine)
            raise
        return f"{url}: SGLang {about.get('version', '?')}, {about.get('model_path', 'no model path')}, tp {about.get('tp_size') or 1}"

    async def detach(self, url: str) -> str:
        """Let an engine go; its requests are continued by others. One that was started here ends, another goes on without us."""
        engine = next((engine for engine in self.engines if engine.url == url.rstrip("/")), None)
        if engine is None:
            raise UsageError(f"{url} is no engine of this worker; it has {', '.join(e.url for e in self.engines)}")
        if not any(other.is_up for other in self.of(engine.model if engine.is_frozen else "") if other is not engine):
            raise UsageError(f"{url} is the only engine in service of its model; attach another first, or drain the worker")
        await engine.drain()
        if self.router is not None:
            await self.router.let_go(engine)
        await self._remove(engine)
        return f"{url} is detached{'' if engine.process is None else ' and ended: this worker had started it'}"

    async def _remove(self, engine: Engine) -> None:
        if engine not in self.engines:  # another command was quicker
            return
        self.engines.remove(engine)
        await cancel([self._watching.pop(engine)] if engine in self._watching else [])
        await engine.close()
        if engine in self._claims:
            self._claims.pop(engine).close()
        if engine.process is not None:
            await asyncio.to_thread(engine.process.stop, STOP_S)

    # --- leaving ---

    async def settle(self) -> None:
        """Before the worker leaves: updates under way may end, and no attached engine stays paused by one that does not."""
        updating = [engine for engine in self.engines if engine.is_updating]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(engine.is_updating for engine in updating):
                    await asyncio.sleep(ABORT_POLL_S)

    async def unpause(self) -> None:
        """No attached engine stays paused, also one whose update was cut off."""
        await cancel(self._watching.values())
        await self.weights.stop_recovering()
        await asyncio.gather(*(engine.unpause() for engine in self.engines))

    async def stop(self) -> None:
        """Close the clients and end the processes that were started here, for certain."""
        await self.weights.stop_recovering()
        if self.router is not None:
            await self.router.stop()
        while self.engines:
            await asyncio.gather(*(self._remove(engine) for engine in list(self.engines)))

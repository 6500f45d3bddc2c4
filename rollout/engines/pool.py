"""The inference engines of a worker: started here or attached by URL, each watched, and replaced or given its weights anew.

What is to be done when is decided in rollout/engines/engine_state.py; here it is done. Which engine a request goes to is
rollout/engines/dispatch.py's.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from rollout.engines.backends import BACKENDS
from rollout.engines.engine import Engine, Requests, claim, host_and_port
from rollout.engines.engine_state import PROBE_S, SETTLE_S, Action, Event, PoolState
from rollout.engines.router import Router
from rollout.engines.sglang.process import EngineProcess
from slimebus.bus.errors import SlimebusError, Unreachable, UsageError, WeightsError
from slimebus.config.engine_plan import EngineSpec, engine_specs
from slimebus.config.model_folder import read_config, vocab_size
from slimebus.config.schema import RunConfig
from slimebus.security.exposure import is_local
from slimebus.weights.host.safetensors_file import read_model
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

START_TIMEOUT_S, ATTACH_TIMEOUT_S = 1800.0, 10.0
"""A large model is loaded and its CUDA graphs captured in minutes; an engine that ends earlier is noticed at once."""
STOP_S = 2.0
HALF = ("float16", "half")
HALF_IF_AUTO = (*HALF, "float32", None)
"""Dtypes of a model's config for which SGLang's `auto` is float16; None: it does not say."""
PROBE_PAUSE_S = 1.0
QUIET_S = 30.0
"""An engine that has ended no request for so long is asked whether it generates: that its server answers is not enough."""


class EnginePool:
    """All engines of one worker. `update_weights` moves those of the policy to one version; `lineage` is that of what they serve."""

    def __init__(self, config: RunConfig, model_dir: Path, log_dir: Path, *, name: str, base: Path = Path()) -> None:
        """name: the worker's. base: the folder of the run.yaml."""
        self.config, self.model_dir, self.log_dir, self.name, self.base = config, model_dir, log_dir, name, base
        self.engines: list[Engine] = []
        self.state, self.lineage = PoolState(), ""
        self.vocab_size = vocab_size(model_dir)
        self.newest: SharedVersion | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._tasks: dict[tuple[Engine, str], asyncio.Task[Any]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._claims: dict[Engine, socket.socket] = {}
        self._changed, self._attaching = asyncio.Event(), asyncio.Lock()
        self.router: Router | None = None
        self.on_change: Callable[[], None] = lambda: None
        """Called once an engine changes its state, or has room."""
        self.on_lost: Callable[[], None] = lambda: None
        """Called when no engine of the policy has its weights any more."""

    def engines_of(self, model: str) -> list[Engine]:
        """The engines of a model; of the policy with an empty name. Raises UsageError when there is none."""
        found = [engine for engine in self.engines if (engine.state.model == model if model else not engine.state.is_frozen)]
        if not found:
            names = sorted({engine.state.model or "policy" for engine in self.engines})
            raise UsageError(f"no engine of model {model or 'policy'!r}; there are: {', '.join(names)}")
        return found

    @property
    def request_targets(self) -> list[Requests]:
        """Where requests may be: at the engines, or at the router."""
        return [*self.engines, *([self.router.target] if self.router is not None else [])]

    async def until_change(self) -> None:
        """Return once an engine changes its state, or has room."""
        await self._changed.wait()

    def note_change(self) -> None:
        """What waits in `until_change` looks again, and so does `on_change`."""
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    # --- events and actions ---

    def apply(self, event: Event, engine: Engine | None = None, text: str = "") -> list[Action]:
        """Something has happened; do what is to be done now, and return it. Raises as PoolState.apply."""
        loop = asyncio.get_running_loop()
        actions = self.state.apply(event, engine.state if engine else None, now=loop.time(), text=text)
        for action in actions:
            self._perform_action(action, next(one for one in self.engines if one.state is action.engine))
        if self._timer is not None:
            self._timer.cancel()
        due = self.state.next_deadline
        self._timer = None if due is None else loop.call_at(due, self.apply, "tick")
        self.note_change()
        return actions

    def _perform_action(self, action: Action, engine: Engine) -> None:
        match action.act:
            case "log":
                log.warning("%s", action.text)
            case "lost":
                self.on_lost()
            case "end_requests":
                engine.end()
            case "cancel_load":
                self._tasks[engine, "load"].cancel()
            case _:
                work = {
                    "load": self._load, "replace": self._replace, "abort_requests": self._abort, "resume": Engine.resume,
                    "remove": self._drop_engine,
                }[action.act]  # fmt: skip
                self._start_task(engine, action.act, work)

    def _start_task(self, engine: Engine, what: str, work: Callable[[Engine], Coroutine[Any, Any, Any]]) -> None:
        self._tasks[engine, what] = task = asyncio.create_task(work(engine))
        task.add_done_callback(_log_fault)

    async def _load(self, engine: Engine) -> Exception | None:
        version = self.newest
        assert version is not None
        try:
            await engine.load(version)
        except Exception as bad:  # noqa: BLE001  `update_weights` raises it where no engine has loaded it
            self.apply("load_failed", engine, str(bad) or type(bad).__name__)
            return bad
        self.apply("load_verified", engine, version.tag)
        return None

    async def _replace(self, engine: Engine) -> None:
        """Another process in the place of one that ended or hangs; an attached engine is only waited for again."""
        try:
            if engine.process is not None:
                await asyncio.to_thread(engine.process.stop, STOP_S)
                await engine.close()
                process = self._launch(engine.spec)
                engine.connect(process.url, process, engine.state)
            await self._wait_ready(engine, START_TIMEOUT_S)
        except (SlimebusError, OSError) as bad:
            self.apply("start_failed", engine, str(bad))
        else:
            self._enlist(engine)

    async def _abort(self, engine: Engine) -> None:
        await engine.abort()
        self.apply("requests_ended", engine)

    async def _drop_engine(self, engine: Engine) -> None:
        if (engine, "resume") in self._tasks:
            await self._tasks[engine, "resume"]
        if self.router is not None:
            await self.router.let_go(engine)
        await self._remove(engine)

    # --- starting ---

    async def start(self) -> None:
        """Start every engine and wait until each is ready, or attach to those given, until one is. Raises SlimebusError."""
        urls = self.config.engine.engine_url
        for url in urls:
            await self._claim(url)
        for spec in () if urls else engine_specs(self.config, self.model_dir, self.base):
            process, config = self._launch(spec), self.config.engine
            size = vocab_size(spec.directory) if spec.is_frozen else self.vocab_size
            self.add(Engine(process.url, process, size, config, spec=spec))
        first = [asyncio.create_task(self._wait_ready(engine, START_TIMEOUT_S)) for engine in self.engines]
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED if urls else asyncio.FIRST_EXCEPTION)
            for engine, task in zip(self.engines, first, strict=True):
                if task.done():
                    task.result()
                    self._enlist(engine)
                else:
                    self._start_task(engine, "replace", self._replace)
        finally:
            for task in first:
                task.cancel()
        if self.config.engine.use_router:
            log_file = self.log_dir / f"router-{self.name}.log"
            self.router = Router(self.config, log_file, lambda: self.engines_of(""), self.vocab_size, on_change=self.note_change)
            await self.router.start()

    def add(self, engine: Engine) -> None:
        """It is starting."""
        self.engines.append(engine)
        self.state.engines.append(engine.state)

    async def _claim(self, url: str) -> Engine:
        claimed = await claim(url)
        engine = Engine(url.rstrip("/"), None, self.vocab_size, self.config.engine)
        self.add(engine)
        self._claims[engine] = claimed
        return engine

    def _launch(self, spec: EngineSpec) -> EngineProcess:
        engine = self.config.engine
        log_file = self.log_dir / f"engine-{self.name}{spec.suffix}.log"
        api_key = engine.engine_api_key or secrets.token_urlsafe(24)  # other users of this host may not use or change it
        process = BACKENDS[engine.engine].process_for(self.config, spec, log_file, api_key)
        process.start()
        log.info("started engine %s at %s (log: %s)", engine.engine, process.url, log_file)
        return process

    async def _wait_ready(self, engine: Engine, timeout_s: float) -> None:
        await engine.wait_ready(timeout_s)
        if engine.process is None:
            await self._note_dtype(engine)

    def _enlist(self, engine: Engine) -> None:
        """It is ready, and watched from now on."""
        self.apply("process_ready", engine)
        if (engine, "monitor") not in self._tasks:
            self._start_task(engine, "monitor", self._monitor)

    async def _note_dtype(self, engine: Engine) -> None:
        """Say so when an engine that others started computes in a dtype with a smaller range than published weights have."""
        try:
            dtype = str((await engine.client.server_info()).get("dtype"))
        except SlimebusError:  # a load asks it again, and says what is wrong
            return
        config = read_config(self.model_dir)
        if dtype in HALF or (dtype == "auto" and (config.get("dtype") or config.get("torch_dtype")) in HALF_IF_AUTO):
            why = "what the trainer publishes is bfloat16: large values become infinite, small ones 0; start it with --dtype bfloat16"
            log.warning("engine at %s computes in float16, and %s", engine.url, why)

    # --- watching ---

    async def _monitor(self, engine: Engine) -> None:
        """Report whether it runs and answers."""
        loop = asyncio.get_running_loop()
        while True:
            asked_at = loop.time()
            if engine.state.phase != "starting":
                if engine.is_dead:
                    self.apply("process_ended", engine)
                else:
                    is_quiet = engine.state.phase == "serving" and engine.running > 0 and asked_at > engine.ended_at + QUIET_S
                    client, answers = engine.client, await engine.client.answers(PROBE_S, generates=is_quiet)
                    if client is engine.client:  # not replaced meanwhile
                        self.apply("probe_answered" if answers else "probe_failed", engine)
            await asyncio.sleep(max(0.0, asked_at + PROBE_PAUSE_S - loop.time()))

    async def check_version(self, engine: Requests) -> None:
        """A request to it failed, or was answered by foreign weights: it is out of service if it has other weights than it was given."""
        for one in [one for one in self.engines if one is engine or engine not in self.engines]:  # the router's were at any of them
            if one.state.phase == "serving" and not one.state.is_frozen:
                expected = one.state.version
                try:
                    found = await one.client.weight_version(retry_s=0.0)
                except SlimebusError as bad:
                    found = bad.text
                if one in self.engines and one.state.version == expected:
                    self.apply("version_found", one, found)

    async def until_ready(self) -> None:
        """Return once an engine of the policy can be given weights."""
        while not any(engine.can_load or engine.is_in_service for engine in self.state.policy):
            await self.until_change()

    async def update_weights(self, version: SharedVersion) -> None:
        """The policy's engines in service serve exactly this version, or SlimebusError: then none of them may be used until a later update.

        One that fails where others succeed is sick, and is given the version later. Those that have it already, since an earlier try failed
        for others, are not touched.
        """
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(shapes_of, self.model_dir)
        check_shapes(version, self._shapes, self.model_dir)
        self.newest = version
        engines = {engine.state: engine for engine in self.engines}
        loads = [self._tasks[engines[action.engine], "load"] for action in self.apply("publish", text=version.tag)]
        if loads:
            await asyncio.wait(loads)
        failures = [bad for load in loads if not load.cancelled() and (bad := load.result()) is not None]
        for bad in failures:
            if not isinstance(bad, SlimebusError):
                raise bad
        if not any(engine.serves(version.tag) for engine in self.state.policy):
            text = "every engine stopped answering while its weights were loaded" if loads else "no engine is up yet"
            raise failures[0] if failures else Unreachable(text)
        self.lineage = version.lineage

    # --- by command, while the worker works ---

    async def attach(self, url: str) -> str:
        """Take in an engine that runs; what it says of itself. Raises SlimebusError, with nothing changed, when it cannot be used."""
        async with self._attaching:  # of two commands for one engine the second finds it
            if any(engine.url == url.rstrip("/") for engine in self.engines):
                raise UsageError(f"{url} is an engine of this worker already")
            self._check_host(url)
            engine = await self._claim(url)
        try:
            about = await engine.client.server_info(retry_s=0.0)
            await self._wait_ready(engine, ATTACH_TIMEOUT_S)
            self._enlist(engine)
        except BaseException:
            await self._remove(engine)
            raise
        return f"{url}: SGLang {about.get('version', '?')}, {about.get('model_path', 'no model path')}, tp {about.get('tp_size') or 1}"

    def _check_host(self, url: str) -> None:
        """Who may send commands does not choose who gets the weights and the engines' key: this worker's own config does."""
        config, host = self.config.engine, host_and_port(url)[0]
        named = {host_and_port(one)[0] for one in config.engine_url} | {one.strip("[]").lower() for one in config.attach_hosts}
        if host not in named and not is_local(f"tcp://{host}:0"):
            remedy = f"name it in engine.attach_hosts of this worker ([{host}]) and start it again"
            raise SlimebusError(f"{url}: no command may have weights sent to the host {host!r}; {remedy}", code="forbidden")

    async def detach(self, url: str) -> str:
        """Let an engine go; its requests are continued by others. One that was started here ends, another goes on without us."""
        engine = next((engine for engine in self.engines if engine.url == url.rstrip("/")), None)
        if engine is None:
            raise UsageError(f"{url} is no engine of this worker; it has {', '.join(e.url for e in self.engines)}")
        self.apply("detach", engine)
        while engine in self.engines:
            await self.until_change()
        return f"{url} is detached{'' if engine.process is None else ' and ended: this worker had started it'}"

    async def _remove(self, engine: Engine) -> None:
        tasks = [self._tasks.pop(of) for of in list(self._tasks) if of[0] is engine]
        await _cancel(task for task in tasks if task is not asyncio.current_task())
        await engine.close()
        if engine in self._claims:
            self._claims.pop(engine).close()
        if engine.process is not None:
            await asyncio.to_thread(engine.process.stop, STOP_S)
        if engine in self.engines:
            self.engines.remove(engine)
        if engine.state in self.state.engines:
            self.state.engines.remove(engine.state)
        self.note_change()

    # --- leaving ---

    async def finish_loads(self) -> None:
        """Before the worker leaves: loads under way may end, and no attached engine stays paused by one that does not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while any(engine.state.loading for engine in self.engines):
                    await self.until_change()

    async def leave(self) -> None:
        """Nothing is watched or loaded any more, and no attached engine stays paused."""
        await self._cancel_tasks("monitor", "replace")
        self.apply("leave")
        await asyncio.gather(*(task for (_, act), task in self._tasks.items() if act == "resume"))

    async def stop(self) -> None:
        """Close the clients and end the processes that were started here, for certain."""
        await self._cancel_tasks("monitor", "replace", "load")
        if self._timer is not None:
            self._timer.cancel()
        if self.router is not None:
            await self.router.stop()
        while self.engines:
            await asyncio.gather(*(self._remove(engine) for engine in list(self.engines)))

    async def _cancel_tasks(self, *acts: str) -> None:
        await _cancel(task for (_, act), task in self._tasks.items() if act in acts)


def _log_fault(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("the care of an engine ended", exc_info=fault)


async def _cancel(tasks: "Iterable[asyncio.Task[Any]]") -> None:
    """End these tasks, and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


TIED = "lm_head.weight"
"""Some checkpoints leave it out where it is the embedding."""


def shapes_of(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """By tensor name; empty where the directory has no safetensors."""
    try:
        return {name: tensor.shape for name, tensor in read_model(model_dir).items()}
    except WeightsError:
        return {}


def check_shapes(version: SharedVersion, expected: Mapping[str, tuple[int, ...]], model_dir: Path) -> None:
    """Raises WeightsError for a tensor that the model does not have: SGLang ends at a wrong shape and passes over an unknown name."""
    if not expected:
        return
    for name, tensor in version.tensors.items():
        wanted, problem = expected.get(name), ""
        if wanted is None and name != TIED:
            problem = f"is not in {model_dir}"
        if wanted is not None and wanted != tensor.shape:
            problem = f"has shape {list(tensor.shape)}, in {model_dir} {list(wanted)}"
        if problem:
            raise WeightsError(f"tensor {name} of version {version.version} {problem}; do trainer and worker have one model?")

"""One engine as the pool sees it: its one state, its requests, its weight updates.

             .---- its process ended, started again ----.
             v                                          |
         starting --ready--> syncing --verified--> serving          any --detached, or the worker leaves--> draining
                               ^  |                  |  |
                               |  '--failed--> sick <'  |   sick: it failed an update, has other weights than it was given, or does
                               |                |       |   not answer; it gets everything anew
                               '----------------'-------'   an update

A frozen engine has weights of its own and goes from starting to serving. Only one that is serving is asked for samples.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Literal

from rollout.engines.client import Completion, EngineClient
from rollout.engines.process import EngineProcess
from rollout.weights.engine_weights import EngineWeights
from slimebus.bus.errors import SlimebusError, Unreachable, WeightsError
from slimebus.bus.messages import NO_VERSION, EngineReport
from slimebus.config.engine_plan import EngineSpec
from slimebus.config.schema import EngineConfig
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

State = Literal["starting", "syncing", "serving", "sick", "draining"]
ABORT_TIMEOUT_S = 5.0
ABORT_POLL_S = 0.05
SETTLE_S = 1.0
"""How long a worker that leaves waits for an update under way, and for an engine to go on."""
OWN_RETRY_S, ATTACHED_RETRY_S = 3.0, 30.0
"""How long a lost connection is retried: our own engine on this host that does not answer has ended."""
ATTACHED = EngineSpec()


class Engine:
    """One engine: its client, the process if it was started here, what it serves, and what it is running.

    spec: what it was started as. on_change: called with each change of `state`.
    """

    def __init__(
        self, url: str, process: EngineProcess | None, vocab_size: int | None, config: EngineConfig, *, spec: EngineSpec = ATTACHED,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.vocab_size, self.config, self.spec, self.on_change = vocab_size, config, spec, on_change
        self.model, self.is_frozen, self.running = spec.model, spec.is_frozen, 0
        self._calls: set[asyncio.Task[list[Completion]]] = set()
        self._groups: dict[str, str] = {}
        self._updating = asyncio.Lock()
        self._update: asyncio.Task[None] | None = None
        self.state: State = "starting"
        self._is_between = False
        self.connect(url, process)

    def connect(self, url: str, process: EngineProcess | None) -> None:
        """It is starting, there."""
        self.url, self.process = url, process
        retry_s, key = (ATTACHED_RETRY_S, self.config.engine_api_key) if process is None else (OWN_RETRY_S, process.api_key)
        self.client = EngineClient(url, vocab_size=self.vocab_size, retry_s=retry_s, api_key=key)
        self.weights = EngineWeights(self.client, pause_mode=self.config.pause_mode, route=self.config.weight_route)
        self.turn("starting")

    def turn(self, state: State) -> None:
        """It is in this state from now on; one that is draining stays so."""
        if self.state not in (state, "draining"):
            self._is_between = (self.state, state) == ("serving", "syncing")
            self.state = state
            self.on_change()

    @property
    def is_up(self) -> bool:
        """Whether it serves, or did until the update that it is at."""
        return self.state == "serving" or self._is_between

    @property
    def is_dead(self) -> bool:
        """True once the process that was started here has ended."""
        return self.process is not None and self.process.is_dead()

    def report(self) -> EngineReport:
        """What the broker is told of it."""
        version = self.weights.tag.rpartition(":")[2]
        number = int(version) if version.isdigit() else NO_VERSION
        is_owned = self.process is not None
        return EngineReport(url=self.url, model=self.model, state=self.state, version=number, running=self.running, is_owned=is_owned)

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once it is up: syncing, or serving where it is frozen. Raises SlimebusError."""
        await (self.process or self.client).wait_ready(timeout_s)
        self.turn("serving" if self.is_frozen else "syncing")

    # --- weights ---

    async def update(self, version: SharedVersion) -> None:
        """The engine serves this version, or it is sick: then whatever it was running has ended too."""
        try:
            async with self._updating:
                self.turn("syncing")
                self._update = asyncio.ensure_future(self.weights.update(version))
                await self._update
                self.turn("serving")
        except BaseException as error:
            self._fall_sick()
            if isinstance(error, asyncio.CancelledError) and not _is_cancelled():
                raise Unreachable(f"engine at {self.url} stopped answering while its weights were updated") from None
            raise

    @property
    def is_updating(self) -> bool:
        """Whether it is between two versions."""
        return self._updating.locked()

    def take_out_of_service(self) -> None:
        """Sick until an update succeeds: whatever it is running or loading ends."""
        if self._update is not None:
            self._update.cancel()
        self.weights.invalidate()
        self._fall_sick()

    def _fall_sick(self) -> None:
        self.turn("sick")
        for call in self._calls:
            call.cancel()

    async def unpause(self) -> None:
        """An attached engine whose update was cut off goes on, for others; its weights may be those of two versions."""
        if self.process is not None or self.is_frozen or self.weights.is_whole:
            return
        log.warning("engine at %s is left with incomplete weights: an update of them was not finished", self.url)
        try:
            await self.client.post_once("/continue_generation", {}, timeout_s=SETTLE_S)
        except SlimebusError as bad:
            log.warning("engine at %s may be left paused: %s", self.url, bad.text)

    async def is_lost(self) -> bool:
        """Whether it has other weights than it was given, or is gone: started again, say. It is sick from then on."""
        if self._updating.locked() or not self.is_up or self.is_frozen:
            return not self.is_up
        async with self._updating:
            try:
                served = await self.client.weight_version(retry_s=0.0)
            except SlimebusError as bad:
                served = bad.text
            if served == self.weights.tag:
                return False
            log.warning("engine at %s: version %s was expected, found: %s; it is given everything anew", self.url, self.weights.tag, served)
            self.weights.invalidate()
            self._fall_sick()
            return True

    # --- requests ---

    @property
    def requests(self) -> list[str]:
        """Names of those that it has."""
        return list(self._groups)

    async def generate(
        self, prompts: list[list[int]], samplings: list[dict[str, Any]], rids: list[str], *, group: str = "", session: str = ""
    ) -> list[Completion]:
        """One completion a prompt. Raises WeightsError when the engine lost its weights meanwhile: what it made then is worth nothing."""
        self._check_service()
        call = asyncio.ensure_future(self.client.generate(prompts, samplings, rids, cache_key=self.weights.cache_key, session=session))
        self._calls.add(call)
        self._groups |= dict.fromkeys(rids, group)
        self.running += len(prompts)
        try:
            return await call
        except asyncio.CancelledError:
            call.cancel()
            aborts = asyncio.gather(*(self.client.abort(rid) for rid in rids), return_exceptions=True)
            await asyncio.shield(asyncio.wait({aborts}, timeout=ABORT_TIMEOUT_S))
            aborts.cancel()
            if not _is_cancelled():
                self._check_service()
            raise
        finally:
            self._calls.discard(call)
            for rid in rids:
                del self._groups[rid]
            self.running -= len(prompts)
            self.on_change()

    def _check_service(self) -> None:
        if not self.is_up and self.state != "draining":
            raise WeightsError(f"the engine at {self.url} is out of service until its weights are whole again; the group is given back")

    async def abort(self, group: str | None = None) -> None:
        """End its requests of this group, or all: their callers get what there is. Returns once none is left."""
        # A request that arrives at the engine while this goes out is ended by another round.
        while rids := [rid for rid, of in self._groups.items() if group in (None, of)]:
            await asyncio.gather(*map(self.client.abort, rids), return_exceptions=True)
            await asyncio.sleep(ABORT_POLL_S)

    async def drain(self) -> None:
        """It gets no more requests, and those that it has end: what they have made is continued by others. It is left unpaused."""
        self.turn("draining")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self.abort()
        if self._update is not None:
            await asyncio.wait({self._update}, timeout=SETTLE_S)
            self._update.cancel()
        for call in self._calls:
            call.cancel()
        await self.unpause()

    async def close(self) -> None:
        """Close the connections."""
        await self.weights.close()
        await self.client.close()


def _is_cancelled() -> bool:
    """Whether the caller's own task is to end, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

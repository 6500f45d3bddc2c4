"""One engine as the pool sees it: requests, weight updates, and being out of service between a failure and the next update.

in service --update fails, weights are other ones, it hangs--> out of service --update of everything--> in service
"""

import asyncio
import logging
from typing import Any

from rollout.engines.client import Completion, EngineClient
from rollout.engines.process import EngineProcess
from rollout.weights.engine_weights import EngineWeights
from slimebus.bus.errors import SlimebusError, Unreachable, WeightsError
from slimebus.cli.config.schema import EngineConfig
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

ABORT_TIMEOUT_S = 5.0
SETTLE_S = 1.0
"""How long a worker that leaves waits for an update under way, and for an engine to go on."""
OWN_RETRY_S, ATTACHED_RETRY_S = 3.0, 30.0
"""How long a lost connection is retried: our own engine on this host that does not answer has ended."""


class Engine:
    """One engine: its client, the process if it was started here, what it serves, and what it is running."""

    def __init__(self, url: str, process: EngineProcess | None, vocab_size: int | None, config: EngineConfig) -> None:
        self.url, self.process, self.running = url, process, 0
        retry_s, key = (ATTACHED_RETRY_S, config.engine_api_key) if process is None else (OWN_RETRY_S, process.api_key)
        self.client = EngineClient(url, vocab_size=vocab_size, retry_s=retry_s, api_key=key)
        self.weights = EngineWeights(self.client, pause_mode=config.pause_mode, route=config.weight_route)
        self._calls: set[asyncio.Task[list[Completion]]] = set()
        self._updating = asyncio.Lock()
        self._update: asyncio.Task[None] | None = None

    @property
    def is_dead(self) -> bool:
        """True once the process that was started here has ended."""
        return self.process is not None and self.process.is_dead()

    async def update(self, version: SharedVersion) -> None:
        """The engine serves this version, or it serves nobody: then whatever it was running has ended too."""
        try:
            async with self._updating:
                self._update = asyncio.ensure_future(self.weights.update(version))
                await self._update
        except BaseException as error:
            self._end_calls()
            if isinstance(error, asyncio.CancelledError) and not _is_cancelled():
                raise Unreachable(f"engine at {self.url} stopped answering while its weights were updated") from None
            raise

    @property
    def is_updating(self) -> bool:
        """Whether it is between two versions."""
        return self._updating.locked()

    def take_out_of_service(self) -> None:
        """Out of service until an update succeeds: whatever it is running or loading ends."""
        if self._update is not None:
            self._update.cancel()
        self.weights.invalidate()
        self._end_calls()

    async def unpause(self) -> None:
        """An attached engine whose update was cut off goes on, for others; its weights may be those of two versions."""
        if self.process is not None or not self.weights.is_out_of_service:
            return
        log.warning("engine at %s is left with incomplete weights: an update of them was not finished", self.url)
        try:
            await self.client.post_once("/continue_generation", {}, timeout_s=SETTLE_S)
        except SlimebusError as bad:
            log.warning("engine at %s may be left paused: %s", self.url, bad.text)

    def _end_calls(self) -> None:
        for call in self._calls:
            call.cancel()

    async def take_out_if_lost(self) -> bool:
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
            self.weights.invalidate()
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
            aborts = asyncio.gather(*(self.client.abort(rid) for rid in rids), return_exceptions=True)
            await asyncio.shield(asyncio.wait({aborts}, timeout=ABORT_TIMEOUT_S))
            aborts.cancel()
            if not _is_cancelled():
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
        await self.weights.close()
        await self.client.close()


def _is_cancelled() -> bool:
    """Whether the caller's own task is to end, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

"""The policy's weights in all engines of a worker: one version for all, and later for each that missed it."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollout.engines.engine import Engine
from rollout.weights.model_shapes import check_shapes, shapes_of
from slimebus.bus.errors import SlimebusError, Unreachable
from slimebus.weights.host.shared_folder import SharedVersion

log = logging.getLogger("rollout")

RECOVERY_RETRY_S = 1.0


class PolicyWeights:
    """Moves engines to versions. `lineage` is that of what they serve."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir, self.lineage = model_dir, ""
        self.newest: SharedVersion | None = None
        self._shapes: dict[str, tuple[int, ...]] | None = None
        self._recovering: dict[Engine, asyncio.Task[None]] = {}

    async def update(self, engines: Sequence[Engine], version: SharedVersion) -> None:
        """Engines serve exactly this version, or SlimebusError: then none of them may be used until a later update.

        One that fails where others succeed is sick, and `recover` is for it. Engines that have the version already, since an earlier try
        failed for others, are not touched.
        """
        if self._shapes is None:
            self._shapes = await asyncio.to_thread(shapes_of, self.model_dir)
        check_shapes(version, self._shapes, self.model_dir)
        self.newest = version
        asked = [engine for engine in engines if engine.is_up] or [engine for engine in engines if engine.state in ("syncing", "sick")]
        if not asked:
            raise Unreachable("no engine is up yet")
        outcomes = await asyncio.gather(*(engine.update(version) for engine in asked), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if len(failures) == len(asked) or not isinstance(failure, SlimebusError):
                raise failure
            log.warning("weights: %s; this engine is out of service, the others serve version %d", failure.text, version.version)
        self.lineage = version.lineage

    def holds_up(self, engine: Engine, engines: Sequence[Engine]) -> bool:
        """Whether others wait for its update, which they have behind them."""
        return engine.is_updating and any(self.newest is not None and other.weights.serves(self.newest) for other in engines)

    def recover(self, engine: Engine, engines: Sequence[Engine]) -> None:
        """Bring an engine that missed the newest version to it, in the background, where another has it already."""
        if engine.is_updating or engine in self._recovering or self.newest is None or engine.weights.serves(self.newest):
            return
        if any(other.weights.serves(self.newest) for other in engines):
            self._recovering[engine] = asyncio.create_task(self._recover(engine))

    async def _recover(self, engine: Engine) -> None:
        said = ""
        try:
            while self.newest is not None and not engine.weights.serves(self.newest) and engine.state in ("syncing", "sick"):
                try:
                    await engine.update(self.newest)
                except SlimebusError as bad:
                    if bad.text != said:
                        log.warning("engine at %s stays out of service: %s", engine.url, bad.text)
                    said = bad.text
                    await asyncio.sleep(RECOVERY_RETRY_S)
            log.info("engine at %s is %s", engine.url, engine.state)
        finally:
            del self._recovering[engine]

    async def stop_recovering(self) -> None:
        """Whatever `recover` is at ends."""
        await cancel(self._recovering.values())


async def cancel(tasks: "Iterable[asyncio.Task[None]]") -> None:
    """End these tasks, and wait until they have ended."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)

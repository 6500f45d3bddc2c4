"""Keeps a worker's engines on the newest published version: pull into shared memory, verify, load, check.

    announced --> pull (deltas, verified by hash) into files in /dev/shm --> engines --> `serving`

`serving` only moves after every engine reported the new version; a failure leaves it empty until a later try succeeds.
"""

import asyncio
import logging
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engines import Engines
from rollout.relay import Relay
from slimebus.config.schema import WeightsConfig
from slimebus.errors import ConfigError, SlimebusError, WeightsError
from slimebus.messages import NO_VERSION
from slimebus.security.key_file import KeyPair
from slimebus.spans import Spans
from slimebus.weights.host_share import HostShare, sweep_turns
from slimebus.weights.shared_folder import SharedFolder
from slimebus.weights.shared_version import SharedVersion

log = logging.getLogger("rollout")

RETRY_S = 1.0


class WeightSync:
    """Follows announcements. `serving` is (lineage, version) that every engine verifiably has; version NO_VERSION: none."""

    def __init__(
        self,
        engines: Engines,
        model_dir: Path,
        *,
        shm: str,
        pull_timeout_s: float,
        on_change: Callable[[], None],
        pair: Callable[[], KeyPair | None] = lambda: None,
        disk: Path | None = None,
        relay: Relay | None = None,
        spans: Spans | None = None,
        threads: int = 2,
    ) -> None:
        self.engines, self.model_dir, self.pull_timeout_s, self.on_change = engines, model_dir, pull_timeout_s, on_change
        self.disk, self.relay, self.spans = disk, relay, spans or Spans()
        self._pair, self._pair_used = pair, pair()
        self._threads = threads
        self.serving: tuple[str, int] = ("", NO_VERSION)
        self.failures = 0
        self.last_sync_s = 0.0
        self.stage_s: dict[str, float] = {}  # of the last version served: wire, verify, share, load
        self.pulled_bytes = 0
        self.neighbour_bytes = 0
        self._target: tuple[str, int, tuple[str, ...]] = ("", NO_VERSION, ())
        self._digest = ("", NO_VERSION, "")
        self._news = asyncio.Event()
        self._weights: Any = None
        self._pulled_s: dict[str, float] = {}
        self._puller: Any = None
        self._publishers: tuple[str, ...] = ()
        self._is_closed = False
        self._served: tuple[SharedVersion, ...] = ()
        self._folder = _folder_in(shm)
        engines.on_lost = self.invalidate

    def announce(self, lineage: str, version: int, publishers: list[str], digest: str = "") -> None:
        """A version exists; called for every hint, heartbeat reply and welcome. Repeats cost nothing.

        digest: of the whole version, where it is known; a pull that gives another one is not served.
        """
        self._digest = (lineage, version, digest)
        target = (lineage, version, tuple(publishers))
        if (target[0], target[2]) == (self._target[0], self._target[2]) and version < self._target[1]:
            return  # overtaken on its way: versions of a lineage only rise
        if version != NO_VERSION and publishers and target != self._target:
            self._target = target
            self._news.set()
            if self._puller is not None and target[2] != self._publishers:
                self._puller.cancel()  # its trainer has been replaced: what it waits for may never come

    def invalidate(self) -> None:
        """The engines lost their weights: serve nothing until they are loaded again, which is being done where nothing is served."""
        if self.serving[1] != NO_VERSION:
            self.serving = ("", NO_VERSION)
            self._news.set()

    async def run(self) -> None:
        """Follow announcements until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            while self.serving != self._target[:2] and not self._news.is_set():
                try:
                    await self.engines.restart_dead()
                    await self._sync(*self._target)
                except SlimebusError as bad:
                    if self._news.is_set():
                        log.info("weights: %s; there are newer ones", bad.text)
                        break
                    self.failures += 1
                    log.warning("weights: %s; trying again in %.0f s", bad.text, RETRY_S)
                    await asyncio.sleep(RETRY_S * random.uniform(0.75, 1.25))  # what failed for all does not come back to all at once

    async def _sync(self, lineage: str, version: int, publishers: tuple[str, ...]) -> None:
        start = time.monotonic()
        with self.spans("pull", version=version) as pull:
            weights = await asyncio.to_thread(self._pull, lineage, publishers)
            pull.about["version"] = weights.version
        if weights.lineage != lineage or weights.version < version:
            raise SlimebusError(f"pulled version {weights.version} of lineage {weights.lineage!r}, announced was {version} of {lineage!r}")
        self._check_digest(weights)
        with self.spans("share", version=weights.version) as share:
            weights, shared = await asyncio.to_thread(self._share, weights)
        self.serving = ("", NO_VERSION)  # until each engine has said what it serves
        try:
            with self.spans("load", version=weights.version) as load:
                await self.engines.update_weights(shared)
        except WeightsError:
            self._weights = None  # should its memory be damaged: what the next pull takes of it is hashed again
            raise
        await asyncio.to_thread(self._retain, weights, shared)
        self.serving = (weights.lineage, weights.version)
        if (self._target[0], self._target[2]) == (lineage, publishers) and weights.version > self._target[1]:
            self._target = (lineage, weights.version, publishers)
        self.last_sync_s = time.monotonic() - start
        self.stage_s = {**self._pulled_s, "share": share.seconds, "load": load.seconds}
        log.debug("serving version %d of %s after %.0f ms", weights.version, weights.lineage, 1000 * self.last_sync_s)
        self.on_change()

    def _check_digest(self, weights: Any) -> None:
        """Each publisher vouches for its part; that the parts are all there, the trainer's word through the broker does."""
        lineage, version, digest = self._digest
        if digest and (weights.lineage, weights.version) == (lineage, version) and weights.digest != digest:
            self._weights = None
            raise WeightsError(f"version {version} of lineage {lineage!r} has digest {weights.digest}, announced was {digest}")

    def _pull(self, lineage: str, publishers: tuple[str, ...]) -> Any:
        pair = self._pair()
        if self._puller is None or (self._publishers, self._pair_used) != (publishers, pair):
            self._close_puller()
            self._publishers, self._pair_used = publishers, pair
            self._puller = self._make_puller(lineage, publishers)
        if self._is_closed or publishers != self._target[2]:  # before there was a puller to close or to cancel
            self._close_puller()
            raise SlimebusError("the pull was cancelled", retryable=True)
        puller = self._puller
        if puller is None:
            raise SlimebusError("the pull was cancelled", retryable=True)
        weights = puller.pull(self._weights, deadline_s=self.pull_timeout_s)
        self.pulled_bytes, self.neighbour_bytes = puller.counts.received_bytes, puller.counts.neighbour_bytes
        self._pulled_s = dict(puller.stages.seconds)
        return weights

    def _make_puller(self, lineage: str, publishers: tuple[str, ...]) -> Any:
        from slimebus.weights.codec import codec_path
        from slimebus.weights.disk_chain import SCHEME, DiskPuller, chain_dir
        from slimebus.weights.puller import WeightPuller

        log.info("weights from %s, codec %s", ", ".join(publishers), codec_path())
        host = HostShare(self._folder, " ".join(publishers))
        if not publishers[0].startswith(SCHEME):
            if self.relay is None:
                return WeightPuller(publishers, pair=self._pair_used, host=host, threads=self._threads)
            onward, serves = self.relay.onward, self.relay.address
            return WeightPuller(publishers, pair=self._pair_used, onward=onward, serves=serves, host=host, threads=self._threads)
        if self.disk is None:
            raise SlimebusError(
                f"the trainer writes its weights to {publishers[0]}; "
                "set weights.weights_transport: disk, and weights.weights_dir to where this node sees that directory",
                code="config",
            )
        return DiskPuller(chain_dir(self.disk, lineage), host=host)

    def _close_puller(self) -> None:
        puller, self._puller = self._puller, None  # the pulling thread may close it too
        if puller is not None:
            puller.close()

    def _share(self, weights: Any) -> tuple[Any, SharedVersion]:
        """The version in shared memory; beside it only the one that engines serve stays there."""
        weights = self._folder.hold(weights)
        shared = self._folder.make_version(weights, self.model_dir)
        self._folder.retain(*self._served, shared)
        return weights, shared

    def _retain(self, weights: Any, shared: SharedVersion) -> None:
        """Only this version from now on; in a thread, for a large one is unmapped page by page."""
        self._weights, self._served = weights, (shared,)
        self._folder.retain(shared)

    def close(self) -> None:
        """Close the connections and free the shared memory. A pull that is just beginning in its thread ends too."""
        self._is_closed = True
        self._close_puller()
        self._folder.close()


def _folder_in(shm: str) -> SharedFolder:
    """Raises ConfigError when nothing can be written there."""
    is_missing = shm == WeightsConfig().weights_shm and not Path(shm).is_dir()  # some systems have none
    root = Path(tempfile.gettempdir() if is_missing else shm)
    try:
        sweep_turns(root)
        return SharedFolder(root)
    except OSError as bad:
        raise ConfigError(f"weights.weights_shm {root}: {bad.strerror}; it must be a directory that this worker may write to") from None

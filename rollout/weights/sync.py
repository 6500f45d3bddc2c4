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

from rollout.engines.pool import EnginePool
from slimebus.bus.errors import ConfigError, SlimebusError, WeightsError
from slimebus.bus.messages import NO_VERSION
from slimebus.bus.transport.client import Client
from slimebus.bus.transport.server import Limits, connections_of
from slimebus.client.pull_keyring import PullKeyring
from slimebus.config.schema import RunConfig, WeightsConfig
from slimebus.security.exposure import advertised
from slimebus.security.key_file import KeyPair
from slimebus.telemetry.spans import Spans
from slimebus.weights.codec.delta_codec import codec_path
from slimebus.weights.files.disk_chain import SCHEME, DiskPuller, chain_dir
from slimebus.weights.host.shared_folder import SharedFolder, SharedVersion
from slimebus.weights.pull.connection import with_key
from slimebus.weights.pull.pull_loop import HostPullSharing, PullLoop
from slimebus.weights.pull.puller import WeightPuller
from slimebus.weights.store.server import RelayPayloads, WeightServer
from slimebus.weights.tensors import Weights, hash_bytes


class WeightRelay:
    """A weight server beside the puller. address: where others reach it."""

    def __init__(self, client: Client, config: RunConfig) -> None:
        """Raises SlimebusError for an address that cannot be bound, or when the broker does not say which keys may pull."""
        keyring = PullKeyring.for_client(client)
        self.payloads = RelayPayloads()
        limits = Limits(max_connections=connections_of(config.broker.max_clients))
        self.server = WeightServer(self.payloads, config.weights.fanout_bind, keyring=keyring, limits=limits)
        self.address = with_key(advertised(self.server.endpoint, "", client.address), keyring.pair.public if keyring else "")

    def close(self) -> None:
        """Stop serving."""
        self.server.close()


log = logging.getLogger("rollout")

RETRY_S = 1.0
ANNOUNCED_S = 10.0
"""A version that was pulled before it was announced waits so long for its digest."""
KEPT_DIGESTS = 64


class WeightSync:
    """Follows announcements. `serving` is (lineage, version) that every engine verifiably has; version NO_VERSION: none."""

    def __init__(
        self, engines: EnginePool, model_dir: Path, *, shm: str, pull_timeout_s: float, on_change: Callable[[], None],
        pair: Callable[[], KeyPair | None] = lambda: None, disk: Path | None = None, relay: WeightRelay | None = None,
        spans: Spans | None = None, threads: int = 2,
    ) -> None:  # fmt: skip
        self.engines, self.model_dir, self.pull_timeout_s, self.on_change = engines, model_dir, pull_timeout_s, on_change
        self.disk, self.relay, self.spans = disk, relay, spans or Spans()
        self._pair, self._pair_used, self._threads = pair, pair(), threads
        self.serving: tuple[str, int] = ("", NO_VERSION)
        self.failures = 0
        self.last_sync_s = 0.0
        self.stage_s: dict[str, float] = {}  # of the last version served: wire, verify, share, load
        self.pulled_bytes = self.neighbour_bytes = 0
        self._target: tuple[str, int, tuple[str, ...]] = ("", NO_VERSION, ())
        self._digests: dict[tuple[str, int], str] = {}
        self._news, self._announced = asyncio.Event(), asyncio.Event()
        self._weights: Weights | None = None
        self._held: SharedVersion | None = None  # the same, as engines load it
        self._is_suspect = False  # an engine failed to load it: its memory may be damaged
        self._received_s: dict[str, float] = {}
        self._puller: PullLoop | None = None
        self._publishers: tuple[str, ...] = ()
        self._is_closed = False
        self._served: tuple[SharedVersion, ...] = ()
        self._folder = _folder_in(shm)
        engines.on_lost = self.invalidate

    def announce(self, lineage: str, version: int, publishers: list[str], digest: str) -> None:
        """A version exists; called for every hint, heartbeat reply and welcome. Repeats cost nothing.

        digest: of the whole version. Nothing else is served as this version, and nothing at all where it is empty. It comes from the
        trainer through the broker, so trust in a version does not rest on where its bytes came from.
        """
        if version == NO_VERSION:
            return
        if not digest:
            log.warning("version %d of lineage %r is refused: it was announced without a digest", version, lineage)
            return
        self._digests = {known: of for known, of in self._digests.items() if known[0] == lineage and known[1] > version - KEPT_DIGESTS}
        self._digests[lineage, version] = digest
        self._announced.set()
        target = (lineage, version, tuple(publishers))
        if (target[0], target[2]) == (self._target[0], self._target[2]) and version < self._target[1]:
            return  # overtaken on its way: versions of a lineage only rise
        if publishers and target != self._target:
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
                    await self.engines.until_ready()
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
        shared = await asyncio.to_thread(self._find_held, lineage, version) or await self._receive(lineage, version, publishers)
        self.serving = ("", NO_VERSION)  # until each engine has said what it serves
        try:
            with self.spans("load", version=shared.version) as load:
                await self.engines.update_weights(shared)
        except WeightsError:
            self._is_suspect = True
            raise
        self.serving = (shared.lineage, shared.version)  # at once: from here on `invalidate` says that they were lost
        self._is_suspect, self._served = False, (shared,)
        await asyncio.to_thread(self._folder.retain, shared)  # a large version is unmapped page by page
        if (self._target[0], self._target[2]) == (lineage, publishers) and shared.version > self._target[1]:
            self._target = (lineage, shared.version, publishers)
        self.last_sync_s = time.monotonic() - start
        self.stage_s = {**self._received_s, "load": load.seconds}
        log.debug("serving version %d of %s after %.0f ms", shared.version, shared.lineage, 1000 * self.last_sync_s)
        self.on_change()

    def _find_held(self, lineage: str, version: int) -> SharedVersion | None:
        """The version if it is here already and hashes to what was pulled: its engines may have ended after its publishers left."""
        weights, shared = self._weights, self._held
        if weights is None or shared is None or (shared.lineage, shared.version) != (lineage, version):
            return None
        if any(hash_bytes(weights.tensors[name].buffer) != known for name, known in weights.hashes.items()):
            return None
        self._received_s = {}
        return shared

    async def _receive(self, lineage: str, version: int, publishers: tuple[str, ...]) -> SharedVersion:
        """Pull the version, or a newer one, compare it with what was announced, and hold it in shared memory."""
        with self.spans("pull", version=version) as pull:
            weights = await asyncio.to_thread(self._pull, lineage, publishers)
            pull.about["version"] = weights.version
        if weights.lineage != lineage or weights.version < version:
            raise SlimebusError(f"pulled version {weights.version} of lineage {weights.lineage!r}, announced was {version} of {lineage!r}")
        await self._check_digest(weights)
        with self.spans("share", version=weights.version) as share:
            shared = await asyncio.to_thread(self._share, weights)
        self._received_s["share"] = share.seconds
        return shared

    async def _check_digest(self, weights: Weights) -> None:
        """Raises WeightsError unless this is what the trainer announced. A version that is pulled before its announcement waits for it."""
        of = (weights.lineage, weights.version)
        deadline = time.monotonic() + ANNOUNCED_S
        while of not in self._digests and weights.version > max(version for _, version in self._digests):
            self._announced.clear()
            try:
                await asyncio.wait_for(self._announced.wait(), deadline - time.monotonic())
            except TimeoutError:
                raise WeightsError(f"version {weights.version} of lineage {weights.lineage!r} was pulled but not announced") from None
        announced = self._digests.get(of, "")
        if weights.digest != announced:
            self._weights = None if announced else self._weights
            what = f"version {weights.version} of lineage {weights.lineage!r}"
            raise WeightsError(f"{what} has digest {weights.digest}, but the trainer announced {announced or 'no digest for it'}")

    def _pull(self, lineage: str, publishers: tuple[str, ...]) -> Weights:
        pair = self._pair()
        if self._puller is None or (self._publishers, self._pair_used) != (publishers, pair):
            self._close_puller()
            self._publishers, self._pair_used = publishers, pair
            self._puller = self._make_puller(lineage, publishers)
        if self._is_closed or publishers != self._target[2]:  # before there was a puller to close or to cancel
            self._close_puller()
        puller = self._puller
        if puller is None:
            raise SlimebusError("the pull was cancelled", retryable=True)
        have = None if self._is_suspect else self._weights  # what is taken of a suspect version is hashed again
        weights = puller.pull(have, deadline_s=self.pull_timeout_s)
        self.pulled_bytes, self.neighbour_bytes = puller.counts["received_bytes"], puller.counts["neighbour_bytes"]
        self._received_s = dict(puller.stages.seconds)
        return weights

    def _make_puller(self, lineage: str, publishers: tuple[str, ...]) -> PullLoop:
        log.info("weights from %s, codec %s", ", ".join(publishers), codec_path())
        host = HostPullSharing(self._folder, " ".join(publishers))
        if not publishers[0].startswith(SCHEME):
            payloads, serves = (self.relay.payloads, self.relay.address) if self.relay else (None, "")
            return WeightPuller(publishers, pair=self._pair_used, relay=payloads, serves=serves, host=host, threads=self._threads)
        if self.disk is None:
            remedy = "set weights.weights_dir to where this node sees that directory"
            raise SlimebusError(f"the trainer writes its weights to {publishers[0]}; {remedy}", code="config")
        return DiskPuller(chain_dir(self.disk, lineage), host=host)

    def _close_puller(self) -> None:
        puller, self._puller = self._puller, None  # the pulling thread may close it too
        if puller is not None:
            puller.close()

    def _share(self, weights: Weights) -> SharedVersion:
        """The version in shared memory; beside it only the one that engines serve stays there."""
        self._weights = self._folder.place_in_memory(weights)
        self._held = shared = self._folder.make_version(self._weights, self.model_dir)
        self._folder.retain(*self._served, shared)
        self._is_suspect = False
        return shared

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
        return SharedFolder(root)
    except OSError as bad:
        raise ConfigError(f"weights.weights_shm {root}: {bad.strerror}; it must be a directory that this worker may write to") from None

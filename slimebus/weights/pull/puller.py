"""Pulls versions from weight servers: changed tensors only, verified, into buffers of their own.

    manifest of every part -> what is known already? -> chunks, `credits` requests in flight per part -> verify, apply, verify
        ^                                                                                        |
        +---- gone, wrong bytes, parts at two versions: keep what is verified, ask again --------+

A tensor counts when its bytes hash to what the publisher says, whichever way they came; a version counts when all its tensors
do. Until then nobody sees any of it.
"""

import functools
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait

import msgspec

from slimebus.bus.errors import FatalWeightsError, SlimebusError, Unreachable, WeightsError
from slimebus.security.key_file import KeyPair
from slimebus.weights.messages import Manifest, ManifestReply, ManifestRequest, check_names, decode_manifest
from slimebus.weights.pull.connection import LATER_PAUSE_S, BadSource, Stream, WeightServerConnection, chunks, wait_for_any
from slimebus.weights.pull.plan import PullPlan, TensorDownload
from slimebus.weights.pull.pull_loop import HostPullSharing, PullLoop, RetryPull
from slimebus.weights.pull.verify import Verifications
from slimebus.weights.store.server import RelayPayloads
from slimebus.weights.tensors import NO_BASE, Target, Weights
from slimebus.weights.threads import Threads

log = logging.getLogger("slimebus.weights")

CHUNK_BYTES = 1 << 20
"""Larger frames are slower: 0.93 GB/s over loopback with 1 MiB, 0.46 with 16 MiB."""

MAX_SOURCES = 8
"""Connections to other workers that are kept."""
MAX_AVOIDED = 16
"""Workers that failed and are not pulled from; the one that failed longest ago is tried again."""
MAX_ASKERS = 32
"""Publishers that are asked for their manifest at once; each may have to merge a chain first."""


class WeightPuller(PullLoop):
    """Pulls from `endpoints`; each serves one part of the model (one endpoint: all of it).

    credits: chunk requests in flight per part. stall_s: silence after which a part is connected to anew. max_bytes: the largest
    version that is accepted, a bound on what a wrong manifest can make this process allocate. threads: tensors, and units of a large
    one, applied and verified at once while others arrive. pair: the key to show to servers that have one. relay, serves: where
    verified payloads are put to be passed on, and the address of the server that does so. host: see PullLoop.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        credits: int = 8,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = 3.0,
        max_bytes: int = 1 << 42,
        threads: int = 2,
        pair: KeyPair | None = None,
        relay: RelayPayloads | None = None,
        serves: str = "",
        host: HostPullSharing | None = None,
    ) -> None:
        if not endpoints:
            raise FatalWeightsError("a puller needs the address of at least one weight server")
        self._credits, self._chunk_bytes, self._max_bytes = credits, chunk_bytes, max_bytes
        self._connect_to = functools.partial(WeightServerConnection, name="puller", stall_s=stall_s, pair=pair)
        self._connections = [self._connect_to(endpoint) for endpoint in endpoints]
        super().__init__(", ".join(connection.endpoint for connection in self._connections), host)
        self._relay, self._own_address = relay, serves
        self._sources: dict[str, WeightServerConnection] = {}
        self._avoid: deque[str] = deque(maxlen=MAX_AVOIDED)
        self._threads, self._unit_threads = Threads(threads, "weights-verify"), Threads(threads, "weights-unit")
        self._askers = Threads(min(len(endpoints), MAX_ASKERS), "weights-ask")

    def close(self) -> None:
        """End a pull that another thread waits for (within a second), and close the connections; for good."""
        self._cancelled.set()
        with self._pulling:
            for connection in (*self._connections, *self._sources.values()):
                connection.close()
            for threads in (self._threads, self._unit_threads, self._askers):
                threads.close()

    # --- one round: agree on a version, fetch, verify ---

    def _pull_once(self, plan: PullPlan, deadline: float) -> Weights:
        while True:
            try:
                return self._attempt(plan, deadline)
            except BadSource as bad:
                log.info("%s", bad)
                self._give_up_source(plan, bad)

    def _attempt(self, plan: PullPlan, deadline: float) -> Weights:
        with self.stages("wire"):
            newest = self._request_manifests(plan, [plan.bases()] * len(self._connections), deadline)
            manifests = self._align_versions(plan, newest, deadline)
        entries = [entry for part in manifests for entry in part[0].tensors]
        check_names(entries)
        if sum(entry.form.size for entry in entries) > self._max_bytes:
            version = manifests[0][0].version
            raise FatalWeightsError(f"version {version} is larger than the {self._max_bytes} bytes that this puller accepts")
        targets = {Target(manifest.lineage, manifest.version) for part in manifests for manifest in part}
        if len(targets) > 1:
            self._pull_parts_separately(plan, newest, deadline)
            each = [f"{c.endpoint} at {part[0].version} of {part[0].lineage}" for c, part in zip(self._connections, newest, strict=True)]
            raise RetryPull(f"the publishers are at different versions: {', '.join(each)}")
        target = targets.pop()
        have = plan.have
        if have is not None and (have.lineage, have.version) == target and all(have.hashes.get(e.name) == e.hash for e in entries):
            return have
        self._pull_parts(plan, manifests, self._connections, target, deadline)
        return plan.finish(entries, target)

    def _pull_parts_separately(self, plan: PullPlan, newest: Sequence[list[Manifest]], deadline: float) -> None:
        """Each part as its publisher has it now, so that all can step on from there; who is ahead of another waits for it."""
        if len({part[0].lineage for part in newest}) > 1:
            return
        slowest = min(part[0].version for part in newest)
        for part, connection in zip(newest, self._connections, strict=True):
            target = Target(part[0].lineage, part[0].version)
            if plan.bases(part[0].tensors)[0] < slowest and all(manifest.version == target.version for manifest in part):
                self._pull_parts(plan, [part], [connection], target, deadline)
                for entry in part[0].tensors:  # those that did not change too
                    plan.known[entry.name].version = target.version

    def _pull_parts(
        self,
        plan: PullPlan,
        manifests: Sequence[list[Manifest]],
        publishers: Sequence[WeightServerConnection],
        target: Target,
        deadline: float,
    ) -> None:
        """Have all tensors of these parts verified. Raises RetryPull."""
        entries = [entry for part in manifests for entry in part[0].tensors]
        if self._host and not self._host.take_from_host_or_lock(plan, entries, target, until=deadline, cancelled=self._cancelled):
            raise RetryPull("a neighbour has pulled; this worker has the lock now")
        plan.check_room(entries)
        downloads_of: dict[WeightServerConnection, list[TensorDownload]] = {}  # parts from one worker share its connection
        for part, publisher in zip(manifests, publishers, strict=True):
            source = self._source_of(plan, part)
            downloads = list(plan.missing(part))
            for download in downloads:
                download.source = source
            downloads_of.setdefault(self._connection_to(source) if source else publisher, []).extend(downloads)
        if self._relay is not None:
            self._relay.begin(
                target, [(download.entry.name, download.base_version) for downloads in downloads_of.values() for download in downloads]
            )
        try:
            self._fetch(plan, downloads_of, target, deadline)
        finally:
            if self._relay is not None:
                self._relay.end()

    def _source_of(self, plan: PullPlan, part: Sequence[Manifest]) -> str:
        """The worker that the payloads of a part come from, as its publisher names it; empty: from the publisher."""
        unwanted = (*self._avoid, *plan.past_sources, self._own_address)
        return next((name for name in part[0].sources if name not in unwanted), "") if len(part) == 1 else ""

    def _connection_to(self, source: str) -> WeightServerConnection:
        if source not in self._sources:
            while len(self._sources) >= MAX_SOURCES:
                self._sources.pop(next(iter(self._sources))).close()
            try:
                self._sources[source] = self._connect_to(source)
            except SlimebusError as bad:  # an address that another worker gave, or a key that this one lacks
                raise BadSource(source, f"cannot be asked: {bad.text}") from None
        self.counts["from_workers"] += 1
        return self._sources[source]

    def _give_up_source(self, plan: PullPlan, bad: BadSource) -> None:
        self.counts["bad_sources"] += 1
        if bad.is_past:
            plan.past_sources.add(bad.source)
        else:
            self._avoid.append(bad.source)
        if connection := self._sources.pop(bad.source, None):
            connection.close()

    def _align_versions(self, plan: PullPlan, newest: Sequence[list[Manifest]], deadline: float) -> Sequence[list[Manifest]]:
        """The manifests of the slowest publisher's version, if all others keep what leads to it from what is known here."""
        versions = {part[0].version for part in newest}
        if len(versions) == 1 or len({part[0].lineage for part in newest}) > 1:
            return newest
        older = self._request_manifests(plan, [plan.bases(part[0].tensors) for part in newest], deadline, want=min(versions))
        ahead = [part for part, now in zip(older, newest, strict=True) if now[0].version > min(versions)]
        return newest if any(download.base is None for part in ahead for download in plan.missing(part)) else older

    def _request_manifests(
        self, plan: PullPlan, bases: Sequence[Sequence[int]], deadline: float, want: int = NO_BASE
    ) -> list[list[Manifest]]:
        """For each part, its manifests relative to each of its bases; all of the version that the first is of, where that is kept."""
        serves = self._own_address if self._host is None or self._host.is_puller else ""  # what it takes from a neighbour is no payload
        about = ManifestRequest(have_lineage=plan.lineage, want=want, serves=serves, avoid=[*self._avoid, *plan.past_sources])

        def ask(part: int) -> list[Manifest]:
            connection, wanted, found = self._connections[part], want, list[Manifest]()
            for base in bases[part]:
                found.append(self._manifest(connection, msgspec.structs.replace(about, have_version=base, want=wanted), deadline))
                wanted = found[0].version
            return found

        asked = [self._askers.submit(ask, part) for part in range(len(bases))]
        wait(asked)  # also when one fails: a connection is used by one thread at a time
        return [found.result() for found in asked]

    def _manifest(self, connection: WeightServerConnection, request: ManifestRequest, deadline: float) -> Manifest:
        try:
            reply, bulk = connection.ask(request, deadline, self._cancelled)
            if not isinstance(reply, ManifestReply) or len(bulk) != 1:
                raise WeightsError(f"{connection.endpoint} answered a manifest request with {type(reply).__name__}")
            manifest = decode_manifest(bulk[0], connection.endpoint)
            manifest.sources = reply.sources
            return manifest
        except SlimebusError as problem:
            if not problem.retryable:
                raise
            raise RetryPull(problem.text, adds_information=not isinstance(problem, Unreachable)) from None

    def _fetch(
        self, plan: PullPlan, downloads_of: Mapping[WeightServerConnection, list[TensorDownload]], target: Target, deadline: float
    ) -> None:
        """Every download, `credits` requests in flight on each connection."""
        streams = [
            Stream(connection, downloads, chunks(downloads, target, self._chunk_bytes), self._credits)
            for connection, downloads in downloads_of.items()
        ]
        checks = Verifications(self._threads, self._unit_threads)
        try:
            self._receive(plan, streams, checks, target, deadline)
        finally:
            checks.wait()  # they write to buffers that the next round, or pull, may use
            if self._host is not None:
                self._host.folder.discard_unfinished()

    def _receive(self, plan: PullPlan, streams: Sequence[Stream], checks: Verifications, target: Target, deadline: float) -> None:
        checks.start(download for stream in streams for download in stream.downloads if not download.missing_bytes)
        while waiting := [stream for stream in streams if stream.fill(more=not any(stream.gone for stream in streams))]:
            if self._cancelled.is_set():
                raise WeightsError("the pull was cancelled")
            if time.monotonic() >= deadline:
                raise RetryPull(f"the deadline came; {'; '.join(stream.missing_text for stream in waiting)}")
            if self._host:
                self._host.touch()
            with self.stages("wire"):
                wait_for_any([stream.connection for stream in waiting], LATER_PAUSE_S)
            for stream in waiting:
                with self.stages("wire"):
                    complete = stream.receive(self.counts)
                with self.stages("verify"):
                    checks.start(complete)
            self._accept_verified(plan, checks.finished(), target)
        with self.stages("verify"):
            checks.wait()
        self._accept_verified(plan, checks.finished(), target)
        for stream in streams:
            if stream.gone and stream.source:
                raise BadSource(stream.source, f"does not have {stream.gone!r} of version {target.version}", is_past=True)
            if stream.gone:
                raise RetryPull(f"{stream.gone!r} has changed since version {target.version}; it is followed to the next one")

    def _accept_verified(self, plan: PullPlan, verdicts: Iterable[tuple[TensorDownload, bool]], target: Target) -> None:
        for download, is_right in verdicts:
            self.counts["full_tensors" if download.base is None else "delta_tensors"] += 1
            if is_right:
                plan.keep_verified(download, target)
                if self._relay is not None:
                    self._relay.add(download.entry.name, download.base_version, download.payload.data)
                continue
            self.counts["wrong_bytes"] += 1
            if download.source:
                raise BadSource(download.source, f"sent other bytes of {download.entry.name!r} than its publisher says")
            plan.note_wrong(download.entry, target)
            raise RetryPull(f"tensor {download.entry.name!r} does not have the bytes that its publisher says; pulling it whole")

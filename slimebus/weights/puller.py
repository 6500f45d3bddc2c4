"""Pulls versions from weight servers: changed tensors only, verified, into buffers of their own.

    manifest of every part -> what is known already? -> chunks, `credits` requests in flight per part -> verify, apply, verify
        ^                                                                                        |
        +---- gone, wrong bytes, parts at two versions: keep what is verified, ask again --------+

A tensor counts when its bytes hash to what the publisher says, whichever way they came; a version counts when all its tensors
do. Until then nobody sees any of it.
"""

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import msgspec

from slimebus.errors import SlimebusError, Unreachable, WeightsError
from slimebus.security.key_file import KeyPair
from slimebus.weights.host_share import HostShare
from slimebus.weights.link import Link, wait_for_any
from slimebus.weights.messages import Manifest, ManifestReply, ManifestRequest
from slimebus.weights.onward import Onward
from slimebus.weights.plan import Job, Plan, PullCounts, Target, WrongDigest, check_names
from slimebus.weights.server import LATER_S
from slimebus.weights.stages import Stages
from slimebus.weights.stream import LATER_PAUSE_S, Again, BadSource, Stream, chunks
from slimebus.weights.tensors import NO_BASE, Weights

log = logging.getLogger("slimebus.weights")

CHUNK_BYTES = 1 << 20
"""Larger frames are slower: 0.93 GB/s over loopback with 1 MiB, 0.46 with 16 MiB."""

SAY_S = 10.0
MAX_SOURCES = 8
"""Connections to other workers that are kept."""
MAX_AVOIDED = 16
"""Workers that did not do and are not pulled from; the one that is longest ago is tried again."""
MAX_ASKERS = 32
"""Publishers that are asked for their manifest at once; each may have to merge a chain first."""
MIN_POOLED_BYTES = 1 << 18
"""Smaller tensors are verified sooner than another thread would begin."""


class _NoAnswer(Again):
    """Time ran out while nobody answered; says less than what was wrong before."""


class WeightPuller:
    """Pulls from `endpoints`, each of which serves one part of the model (one endpoint: all of it). Used by one thread at a time.

    credits: chunk requests in flight per part. stall_s: silence after which a part is connected to anew. max_bytes: the largest
    version that is accepted, a bound on what a wrong manifest can make this process allocate. threads: tensors, and units of a large
    one, applied and verified at once while others arrive. pair: the key to show to servers that have one. onward, serves: where
    verified payloads are put to be passed on, and the address of the server that does so. host: the workers of this host, which pull
    once for all of them; tensors then come to be in its folder.
    stages: seconds of the last pull. `wire`: it waited for bytes and took them; `verify`: it made and verified tensors and did nothing
    else. What is verified beside the wire is in neither.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        name: str = "puller",
        credits: int = 8,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = 3.0,
        max_bytes: int = 1 << 42,
        threads: int = 2,
        pair: KeyPair | None = None,
        onward: Onward | None = None,
        serves: str = "",
        host: HostShare | None = None,
    ) -> None:
        if not endpoints:
            raise WeightsError("a puller needs the address of at least one weight server", retryable=False)
        self._links = [Link(endpoint, name=name, stall_s=stall_s, pair=pair) for endpoint in endpoints]
        self._credits, self._chunk_bytes, self._max_bytes = credits, chunk_bytes, max_bytes
        self._link_to: Callable[[str], Link] = lambda endpoint: Link(endpoint, name=name, stall_s=stall_s, pair=pair)
        self._onward, self._own_address, self._host = onward, serves, host
        self._sources: dict[str, Link] = {}
        self._avoid: deque[str] = deque(maxlen=MAX_AVOIDED)
        self._past: deque[str] = deque(maxlen=MAX_AVOIDED)  # in this pull
        self._cancelled = threading.Event()
        self._pulling = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, "weights-verify") if threads > 1 else None
        self._askers = ThreadPoolExecutor(min(len(endpoints), MAX_ASKERS), "weights-ask") if len(endpoints) > 1 else None
        self._units = ThreadPoolExecutor(threads, "weights-unit") if threads > 1 else None
        self._unfinished: Plan | None = None
        self.counts = PullCounts()
        self.stages = Stages()

    def pull(self, have: Weights | None = None, deadline_s: float = 60.0, *, spare: Weights | None = None) -> Weights:
        """The newest complete version; `have` itself when it is that.

        spare: a version that nobody reads any more, whose buffers may be reused. Survives lost connections, restarted servers and
        newer versions that appear meanwhile. Raises WeightsError when no version verified within deadline_s seconds; what did verify
        is not pulled again by the next pull from the same `have`.
        """
        with self._pulling:
            self.stages = Stages()
            plan, self._unfinished = self._unfinished, None
            if plan is None or plan.have is not have:
                memory = self._host.folder if self._host else None
                plan = Plan(have, None if self._host else spare, memory=memory, counts=self.counts)
            self._past.clear()
            if self._host is not None:
                self._host.begin()
            try:
                return self._pull(plan, deadline_s)
            except SlimebusError as bad:
                self._unfinished = plan.rested()
                if isinstance(bad, WeightsError):
                    raise
                raise WeightsError(bad.text, code=bad.code, retryable=bad.retryable) from None
            finally:
                if self._host is not None:
                    self._host.end()

    def _pull(self, plan: Plan, deadline_s: float) -> Weights:
        said_at = time.monotonic()
        deadline = said_at + deadline_s
        reason = ""
        in_vain = 0
        while not self._cancelled.is_set():
            verified_before = plan.num_verified
            try:
                return self._round(plan, deadline)
            except BadSource as bad:
                self._give_up_source(bad)
                reason = str(bad)
                continue
            except Again as again:
                reason = reason if reason and isinstance(again, _NoAnswer) else str(again)
            self.counts.rounds += 1
            in_vain = in_vain + 1 if plan.num_verified == verified_before else 0
            now = time.monotonic()
            if now >= deadline:
                break
            if now - said_at > SAY_S:
                said_at = now
                log.info("no verified version so far: %s", reason)
            self._cancelled.wait(_pause_s(in_vain))
        if self._cancelled.is_set():
            raise WeightsError("the pull was cancelled")
        raise WeightsError(f"no verified version within {deadline_s:.0f} s from {self._addresses()}: {reason}")

    def cancel(self) -> None:
        """End a pull that another thread waits for; for good."""
        self._cancelled.set()

    def close(self) -> None:
        """End a pull that another thread waits for (within a second), and close the connections; for good."""
        self._cancelled.set()
        with self._pulling:
            for link in (*self._links, *self._sources.values()):
                link.close()
            for pool in (self._pool, self._units, self._askers):
                if pool:
                    pool.shutdown()

    @property
    def refused(self) -> Counter[str]:
        """Messages from servers that were not what they should be, by error code."""
        return sum((link.refused for link in self._links), Counter())

    def _addresses(self) -> str:
        return ", ".join(link.endpoint for link in self._links)

    def _versions(self, newest: Sequence[Sequence[Manifest]]) -> str:
        each = zip(self._links, newest, strict=True)
        return ", ".join(f"{link.endpoint} at {part[0].version} of {part[0].lineage}" for link, part in each)

    @property
    def _serves(self) -> str:
        """The address under which this worker passes on what it pulls. What it takes from a neighbour is no payload."""
        return self._own_address if self._host is None or self._host.is_puller else ""

    # --- one round: agree on a version, fetch, verify ---

    def _round(self, plan: Plan, deadline: float) -> Weights:
        with self.stages("wire"):
            newest = self._ask(plan, [plan.bases()] * len(self._links), deadline)
            manifests = self._aligned(plan, newest, deadline)
        entries = [entry for part in manifests for entry in part[0].tensors]
        check_names(entries)
        plan.check_size(entries, manifests[0][0].version, self._max_bytes)
        try:
            target = _agree(manifests)
        except Again:
            self._bring_apart(plan, newest, deadline)
            raise Again(f"the publishers are at different versions: {self._versions(newest)}") from None
        if plan.have is not None and (plan.have.lineage, plan.have.version) == target and _is_same(plan.have, manifests):
            return plan.have
        self._bring(plan, manifests, self._links, target, deadline)
        self.counts.pulls += 1
        try:
            return plan.finish([part[0] for part in manifests], target)
        except WrongDigest as wrong:
            raise Again(wrong.text) from None

    def _bring_apart(self, plan: Plan, newest: Sequence[list[Manifest]], deadline: float) -> None:
        """Each part as its publisher has it now, so that all can step on from there; who is ahead of another waits for it."""
        if len({part[0].lineage for part in newest}) > 1:
            return
        slowest = min(part[0].version for part in newest)
        for part, link in zip(newest, self._links, strict=True):
            if plan.bases(part[0].tensors)[0] < slowest:
                target = _agree([part])
                self._bring(plan, [part], [link], target, deadline)
                plan.settle(part[0].tensors, target)

    def _bring(self, plan: Plan, manifests: Sequence[list[Manifest]], publishers: Sequence[Link], target: Target, deadline: float) -> None:
        """Have all tensors of these parts verified. Raises Again."""
        entries = [entry for part in manifests for entry in part[0].tensors]
        if self._host and not self._host.share(plan, entries, target, until=deadline, cancelled=self._cancelled):
            raise Again("a neighbour has pulled; it is this worker's turn")
        plan.check_room(entries)
        queues = [list(plan.missing(part)) for part in manifests]
        links = [self._source_of(part, link) for part, link in zip(manifests, publishers, strict=True)]
        if self._onward is not None:
            self._onward.begin(target, [(job.entry.name, job.base_version) for jobs in queues for job in jobs])
        try:
            self._fetch(plan, queues, links, target, deadline)
        finally:
            if self._onward is not None:
                self._onward.end()

    def _source_of(self, part: Sequence[Manifest], publisher: Link) -> Link:
        """Where the payloads of a part come from: the worker that its publisher names, or the publisher."""
        unwanted = (*self._avoid, *self._past, self._own_address)
        source = next((name for name in part[0].sources if name not in unwanted), "") if len(part) == 1 else ""
        if not source:
            return publisher
        if source not in self._sources:
            while len(self._sources) >= MAX_SOURCES:
                self._sources.pop(next(iter(self._sources))).close()
            try:
                self._sources[source] = self._link_to(source)
            except SlimebusError as bad:  # an address that another worker gave, or a key that this one lacks
                raise BadSource(source, f"cannot be asked: {bad.text}") from None
        self.counts.from_workers += 1
        return self._sources[source]

    def _give_up_source(self, bad: BadSource) -> None:
        self.counts.bad_sources += 1
        (self._past if bad.is_past else self._avoid).append(bad.source)
        if link := self._sources.pop(bad.source, None):
            link.close()

    def _aligned(self, plan: Plan, newest: Sequence[list[Manifest]], deadline: float) -> Sequence[list[Manifest]]:
        """The manifests of the slowest publisher's version, if all others keep what leads to it from what is known here."""
        versions = {part[0].version for part in newest}
        if len(versions) == 1 or len({part[0].lineage for part in newest}) > 1:
            return newest
        older = self._ask(plan, [plan.bases(part[0].tensors) for part in newest], deadline, want=min(versions))
        ahead = [part for part, now in zip(older, newest, strict=True) if now[0].version > min(versions)]
        return newest if any(job.base is None for part in ahead for job in plan.missing(part)) else older

    def _ask(self, plan: Plan, bases: Sequence[Sequence[int]], deadline: float, want: int = NO_BASE) -> list[list[Manifest]]:
        """For each part, its manifest relative to each of its bases."""
        about = ManifestRequest(have_lineage=plan.lineage, want=want, serves=self._serves, avoid=[*self._avoid, *self._past])
        wanted = [[msgspec.structs.replace(about, have_version=base) for base in of_part] for of_part in bases]
        if self._askers is None:
            return [self._manifests_of(self._links[0], wanted[0], deadline)]
        asked = [self._askers.submit(self._manifests_of, *part, deadline) for part in zip(self._links, wanted, strict=True)]
        wait(asked)  # also when one fails: a link is used by one thread at a time
        return [part.result() for part in asked]

    def _manifests_of(self, link: Link, wanted: Sequence[ManifestRequest], deadline: float) -> list[Manifest]:
        """All of the version that the first is of, where that is kept."""
        first = self._manifest(link, wanted[0], deadline)
        of_first = [msgspec.structs.replace(request, want=first.version) for request in wanted[1:]]
        return [first, *(self._manifest(link, request, deadline) for request in of_first)]

    def _manifest(self, link: Link, request: ManifestRequest, deadline: float) -> Manifest:
        try:
            reply, bulk = link.ask(request, deadline, self._cancelled)
            if not isinstance(reply, ManifestReply) or len(bulk) != 1:
                raise WeightsError(f"{link.endpoint} answered a manifest request with {type(reply).__name__}")
            return msgspec.msgpack.decode(bulk[0], type=Manifest)
        except (msgspec.DecodeError, RecursionError) as bad:
            raise Again(f"the manifest from {link.endpoint} does not parse: {bad}") from None
        except SlimebusError as problem:
            if not problem.retryable:
                raise
            raise (_NoAnswer if isinstance(problem, Unreachable) else Again)(problem.text) from None

    def _fetch(self, plan: Plan, queues: Sequence[Sequence[Job]], links: Sequence[Link], target: Target, deadline: float) -> None:
        """Every job of every part, `credits` requests in flight on each link. Parts that come from one worker share its link."""
        jobs_of: dict[Link, list[Job]] = {}
        for link, jobs in zip(links, queues, strict=True):
            jobs_of.setdefault(link, []).extend(jobs)
        workers = {link: source for source, link in self._sources.items()}
        streams = [
            Stream(link, jobs, chunks(jobs, target, self._chunk_bytes), self._credits, source=workers.get(link, ""))
            for link, jobs in jobs_of.items()
        ]
        checks = _Checks(self._pool, self._units)
        try:
            self._receive(plan, streams, checks, target, deadline)
        finally:
            checks.wait()  # they write to buffers that the next round, or pull, may use
            if self._host is not None:
                self._host.folder.discard_unfinished()

    def _receive(self, plan: Plan, streams: Sequence[Stream], checks: "_Checks", target: Target, deadline: float) -> None:
        source_of = {id(job): stream.source for stream in streams for job in stream.jobs}
        checks.add(job for stream in streams for job in stream.jobs if not job.missing_bytes)
        while waiting := [stream for stream in streams if stream.fill(more=not any(stream.gone for stream in streams))]:
            if self._cancelled.is_set():
                raise WeightsError("the pull was cancelled")
            if time.monotonic() >= deadline:
                raise Again(f"the deadline came; {'; '.join(stream.lack for stream in waiting)}")
            if self._host:
                self._host.tell()
            with self.stages("wire"):
                wait_for_any([stream.link for stream in waiting], LATER_PAUSE_S)
            for stream in waiting:
                with self.stages("wire"):
                    complete = stream.receive(self.counts)
                with self.stages("verify"):
                    checks.add(complete)
            for job, is_right in checks.finished():
                self._accept(plan, job, target, is_right, source_of[id(job)])
        with self.stages("verify"):
            verdicts = checks.finished(wait=True)
        for job, is_right in verdicts:
            self._accept(plan, job, target, is_right, source_of[id(job)])
        for stream in streams:
            if stream.gone and stream.source:
                is_past = stream.quiet_s < LATER_S / 2  # one that has not begun is waited for
                raise BadSource(stream.source, f"does not have {stream.gone!r} of version {target.version}", is_past=is_past)
            if stream.gone:
                raise Again(f"{stream.gone!r} has changed since version {target.version}; it is followed to the next one")

    def _accept(self, plan: Plan, job: Job, target: Target, is_right: bool, source: str) -> None:
        if job.base is None:
            self.counts.full_tensors += 1
        else:
            self.counts.delta_tensors += 1
        if not is_right:
            self.counts.wrong_bytes += 1
            if source:
                raise BadSource(source, f"sent other bytes of {job.entry.name!r} than its publisher says")
            plan.note_wrong(job.entry, target)
            raise Again(f"tensor {job.entry.name!r} does not have the bytes that its publisher says; pulling it whole")
        plan.learn(job, target)
        if self._onward is not None:
            self._onward.add(job.entry.name, job.base_version, job.payload.data)


class _Checks:
    """Verifies completed jobs, large ones in the pool while more arrives."""

    def __init__(self, pool: ThreadPoolExecutor | None, units: ThreadPoolExecutor | None) -> None:
        self._pool, self._units = pool, units
        self._running: list[tuple[Job, Future[bool]]] = []
        self._done: list[tuple[Job, bool]] = []

    def add(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if self._pool is None or job.form.size < MIN_POOLED_BYTES:
                self._done.append((job, job.is_right()))
            else:
                self._running.append((job, self._pool.submit(job.is_right, self._units)))

    def wait(self) -> None:
        """Until nothing is being verified any more."""
        wait([future for _, future in self._running])

    def finished(self, *, wait: bool = False) -> list[tuple[Job, bool]]:
        """Each verdict once, right ones first; with wait, of all jobs."""
        ready = [(job, future.result()) for job, future in self._running if wait or future.done()]
        finished = self._done + ready
        taken = {id(job) for job, _ in ready}
        self._running = [item for item in self._running if id(item[0]) not in taken]
        self._done = []
        return sorted(finished, key=lambda item: not item[1])


def _is_same(have: Weights, manifests: Sequence[Sequence[Manifest]]) -> bool:
    """Whether the publishers say of the version that it is these bytes."""
    return all(have.hashes.get(entry.name) == entry.hash for part in manifests for entry in part[0].tensors)


def _pause_s(in_vain: int) -> float:
    """Jittered, from 5 ms to half a second while rounds verify nothing."""
    return random.uniform(0.5, 1.0) * min(0.5, 0.005 * 2.0 ** min(in_vain, 10))


def _agree(manifests: Sequence[Sequence[Manifest]]) -> Target:
    """The one version that all manifests are of."""
    targets = {Target(manifest.lineage, manifest.version) for part in manifests for manifest in part}
    if len(targets) > 1:
        raise Again("a newer version appeared")
    return targets.pop()

"""What a pull knows, what it still needs, and whether what came is right. No socket here."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from slimebus.errors import WeightsError
from slimebus.weights import codec
from slimebus.weights.messages import DELTA, Manifest, TensorEntry
from slimebus.weights.tensor_file import TensorForm
from slimebus.weights.tensors import NO_BASE, STEPPED_DTYPES, Tensor, Weights, hash_bytes, tensor_bytes, version_digest

MAX_WRONG_BYTES = 3
"""A tensor that fails its hash this often in one pull is not tried again."""


@dataclass
class PullCounts:
    """What a puller has done since it was made. from_workers: rounds whose payloads came from other workers.

    neighbour_tensors, neighbour_bytes: taken from other workers of this host, through shared memory.
    """

    pulls: int = 0
    received_bytes: int = 0
    delta_tensors: int = 0
    full_tensors: int = 0
    neighbour_tensors: int = 0
    neighbour_bytes: int = 0
    wrong_bytes: int = 0
    rounds: int = 0
    from_workers: int = 0
    bad_sources: int = 0


class Memory(Protocol):
    """Where the tensors of a pull come to be, and where some may be already."""

    def allocate(self, form: TensorForm) -> NDArray[np.uint8]:
        """A place for the bytes of a tensor. Called by several threads. Raises WeightsError where there is no room."""

    def keep(self, form: TensorForm, buffer: NDArray[np.uint8]) -> None:
        """They are there, and verified."""

    def check_room(self, size: int) -> None:
        """Raises WeightsError when so many bytes cannot be allocated."""


@dataclass
class Known:
    """A verified tensor and the version it is of (the newest it is known to be the same in)."""

    version: int
    hash: str
    tensor: Tensor


@dataclass
class Job:
    """One payload under way."""

    entry: TensorEntry
    base: Known | None  # None: the payload is the tensor itself
    allocate: Callable[[], NDArray[np.uint8]]
    missing_bytes: int
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    hashed_bytes: int = 0

    @functools.cached_property
    def result(self) -> NDArray[np.uint8]:
        """Where the tensor comes to be. Raises WeightsError where there is no room."""
        return self.allocate()

    @functools.cached_property
    def payload(self) -> NDArray[np.uint8]:
        """Where the payload comes to be; without a base it is the tensor."""
        return self.result if self.base is None else np.empty(self.entry.size, np.uint8)

    @property
    def form(self) -> TensorForm:
        return form_of(self.entry)

    @property
    def base_version(self) -> int:
        """The version that the payload leads from; NO_BASE for the tensor itself."""
        return self.base.version if self.base else NO_BASE

    def put(self, offset: int, frame: memoryview) -> None:
        """Put a piece in its place, hashing it on the way while it is in the cache."""
        self.payload[offset : offset + len(frame)] = np.frombuffer(frame, np.uint8)
        self.missing_bytes -= len(frame)
        if offset == self.hashed_bytes:
            self.hasher.update(frame)
            self.hashed_bytes += len(frame)

    def hash(self) -> str:
        """The hash of the whole payload."""
        return self.hasher.hexdigest() if self.hashed_bytes == len(self.payload) else hash_bytes(self.payload)

    def is_right(self, pool: Executor | None = None) -> bool:
        """Make the tensor; True when it is what its publisher says. Touches nothing but this job's buffers. pool: for units of it."""
        if self.base is None:
            return self.hash() == self.entry.hash
        if self.hash() != self.entry.payload_hash:
            return False
        result, made = self.result.view(np.uint16), xxhash.xxh3_128()
        try:
            for part in codec.apply_to_copy(self.payload, self.base.tensor.steps, result, pool=pool):
                made.update(part.data)
        except WeightsError:
            return False
        return made.hexdigest() == self.entry.hash


def form_of(entry: TensorEntry) -> TensorForm:
    """What the tensor of an entry is."""
    return TensorForm(entry.name, entry.dtype, tuple(entry.shape), entry.hash)


class Target(NamedTuple):
    """The version that a round is about."""

    lineage: str
    version: int


class WrongDigest(WeightsError):
    """The tensors are each what their publisher says, but not together."""


class Plan:
    """What one pull knows so far. It outlives the rounds, so that verified tensors are never fetched twice."""

    def __init__(
        self, have: Weights | None, spare: Weights | None, *, memory: Memory | None = None, counts: PullCounts | None = None
    ) -> None:
        self.have, self._memory, self.counts = have, memory, counts or PullCounts()
        self.lineage = have.lineage if have else ""
        self.known: dict[str, Known] = {}
        if have:
            self.known = {name: Known(have.version, have.hashes[name], tensor) for name, tensor in have.tensors.items()}
        self.num_verified = 0
        self._wrong: Counter[str] = Counter()
        in_use = {id(tensor.buffer) for tensor in have.tensors.values()} if have else set()
        self._spare = {name: t.buffer for name, t in (spare.tensors if spare else {}).items() if id(t.buffer) not in in_use}

    def bases(self, entries: Iterable[TensorEntry] | None = None) -> list[int]:
        """The versions that tensors are known of, NO_BASE for those that are not; of all that are known, or of these."""
        if entries is None:
            versions = {known.version for known in self.known.values()}
        else:
            versions = {self.known[entry.name].version if entry.name in self.known else NO_BASE for entry in entries}
        return sorted(versions) or [NO_BASE]

    def settle(self, entries: Iterable[TensorEntry], target: Target) -> None:
        """All of these tensors are known, and so are of the target, those that did not change too."""
        for entry in entries:
            self.known[entry.name].version = target.version

    def lacks(self, entries: Iterable[TensorEntry]) -> list[TensorForm]:
        """The tensors that are not known as an entry says they are."""
        return [form_of(entry) for entry in entries if not self._has(entry)]

    def _has(self, entry: TensorEntry) -> bool:
        known = self.known.get(entry.name)
        return known is not None and known.hash == entry.hash and (known.tensor.dtype, known.tensor.shape) == (entry.dtype, entry.shape)

    def check_size(self, entries: Sequence[TensorEntry], version: int, max_bytes: int) -> None:
        """Raises WeightsError for more than max_bytes of tensors."""
        if sum(tensor_bytes(e.name, e.dtype, e.shape) for e in entries) > max_bytes:
            raise WeightsError(f"version {version} is larger than the {max_bytes} bytes that this puller accepts", retryable=False)

    def check_room(self, entries: Iterable[TensorEntry]) -> None:
        """Raises WeightsError when there is no room for those of them that are missing."""
        if self._memory is not None:
            self._memory.check_room(sum(form.size for form in self.lacks(entries)))

    def missing(self, relative: Sequence[Manifest]) -> Iterator[Job]:
        """The payloads that are still missing of a part; its manifests differ only in their base."""
        deltas = {manifest.base: {entry.name: entry for entry in manifest.tensors} for manifest in relative}
        for entry in relative[0].tensors:
            if self._has(entry):
                continue
            known = self.known.get(entry.name)
            delta = deltas.get(known.version, {}).get(entry.name) if known else None
            yield self._delta_job(known, delta) if known and delta and self._can_step(known, delta) else self._full_job(entry)

    def _can_step(self, known: Known, entry: TensorEntry) -> bool:
        is_same_form = (known.tensor.dtype, known.tensor.shape) == (entry.dtype, entry.shape) and entry.dtype in STEPPED_DTYPES
        is_smaller = 0 < entry.size < len(known.tensor.buffer)
        return entry.kind == DELTA and is_same_form and is_smaller and known.hash == entry.base_hash and not self._wrong[entry.name]

    def _delta_job(self, known: Known, entry: TensorEntry) -> Job:
        return Job(entry, known, functools.partial(self._buffer, entry), entry.size)

    def _full_job(self, entry: TensorEntry) -> Job:
        return Job(entry, None, functools.partial(self._buffer, entry), form_of(entry).size)

    def _buffer(self, entry: TensorEntry) -> NDArray[np.uint8]:
        form = form_of(entry)
        if self._memory is not None:
            return self._memory.allocate(form)
        spare = self._spare.pop(form.name, None)
        if spare is not None and len(spare) == form.size and spare.flags.writeable:
            return spare
        try:
            return np.empty(form.size, np.uint8)
        except MemoryError:
            raise WeightsError(f"no memory for the {form.size} bytes of tensor {form.name!r}", retryable=False) from None

    def learn(self, job: Job, target: Target) -> None:
        """A tensor is verified."""
        if self._memory is not None:
            self._memory.keep(job.form, job.result)
        self.adopt(job.form, job.result, target)

    def adopt(self, form: TensorForm, buffer: NDArray[np.uint8], target: Target) -> None:
        """A verified tensor is there, wherever it came from."""
        if self.lineage != target.lineage:
            self._enter(target.lineage)
        self.num_verified += 1
        self.known[form.name] = Known(target.version, form.hash, Tensor(form.dtype, form.shape, buffer))

    def note_wrong(self, entry: TensorEntry, target: Target) -> None:
        """Raises WeightsError when it was wrong too often."""
        self._wrong[entry.name] += 1
        if self._wrong[entry.name] >= MAX_WRONG_BYTES:
            raise WeightsError(f"tensor {entry.name!r} of version {target.version} failed its checksum {MAX_WRONG_BYTES} times")

    def _enter(self, lineage: str) -> None:
        """Versions of another lineage are no base any more; their tensors still serve where the hashes agree."""
        self.lineage = lineage
        for known in self.known.values():
            known.version = NO_BASE

    def rested(self) -> "Plan":
        """The plan for another pull: what is verified is known, what was wrong may be right by then."""
        self._wrong.clear()
        return self

    def finish(self, manifests: Sequence[Manifest], target: Target) -> Weights:
        entries = [entry for manifest in manifests for entry in manifest.tensors]
        tensors = {entry.name: self.known[entry.name].tensor for entry in entries}
        hashes = {entry.name: entry.hash for entry in entries}
        for manifest in manifests:
            if version_digest({entry.name: tensors[entry.name] for entry in manifest.tensors}, hashes) != manifest.digest:
                raise WrongDigest(f"version {target.version}: the digest of its tensors is not the one that their publisher says")
        digest = manifests[0].digest if len(manifests) == 1 else version_digest(tensors, hashes)
        return Weights(target.lineage, target.version, digest, tensors, hashes)


def check_names(entries: Iterable[TensorEntry]) -> None:
    """Raises WeightsError when two of the tensors have one name."""
    twice = next((name for name, count in Counter(entry.name for entry in entries).items() if count > 1), None)
    if twice is not None:
        raise WeightsError(f"tensor {twice!r} is served by two publishers, or twice by one", retryable=False)

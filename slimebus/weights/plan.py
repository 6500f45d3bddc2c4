"""What a pull knows, what it still needs, and whether what came is right. No socket here."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from slimebus.errors import WeightsError
from slimebus.weights import codec
from slimebus.weights.messages import DELTA, Manifest, TensorEntry
from slimebus.weights.tensors import NO_BASE, STEPPED_DTYPES, Tensor, Weights, hash_bytes, tensor_bytes, version_digest

MAX_WRONG_BYTES = 3
"""A tensor that fails its hash this often in one pull is not tried again."""


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
    payload: NDArray[np.uint8]
    result: NDArray[np.uint8]  # where the tensor comes to be; the payload itself when there is no base
    missing_bytes: int
    hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)
    hashed_bytes: int = 0

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

    def is_right(self) -> bool:
        """Make the tensor; True when it is what its publisher says. Touches nothing but this job's buffers."""
        if self.base is None:
            return self.hash() == self.entry.hash
        if self.hash() != self.entry.payload_hash:
            return False
        np.copyto(self.result, self.base.tensor.buffer)
        try:
            codec.apply(self.payload, self.result.view(np.uint16))
        except WeightsError:
            return False
        return hash_bytes(self.result) == self.entry.hash


class Target(NamedTuple):
    """The version that a round is about."""

    lineage: str
    version: int


class WrongDigest(WeightsError):
    """The tensors are each what their publisher says, but not together."""


class Plan:
    """What one pull knows so far. It outlives the rounds, so that verified tensors are never fetched twice."""

    def __init__(self, have: Weights | None, spare: Weights | None) -> None:
        self.have = have
        self.lineage = have.lineage if have else ""
        self.known: dict[str, Known] = {}
        if have:
            self.known = {name: Known(have.version, have.hashes[name], tensor) for name, tensor in have.tensors.items()}
        self.num_verified = 0
        self._wrong: Counter[str] = Counter()
        in_use = {id(tensor.buffer) for tensor in have.tensors.values()} if have else set()
        self._spare = {name: t.buffer for name, t in (spare.tensors if spare else {}).items() if id(t.buffer) not in in_use}

    def missing(self, relative: Sequence[Manifest]) -> Iterator[Job]:
        """The payloads that are still missing of a part; its manifests differ only in their base."""
        deltas = {manifest.base: {entry.name: entry for entry in manifest.tensors} for manifest in relative}
        for entry in relative[0].tensors:
            known = self.known.get(entry.name)
            if known and known.hash == entry.hash and (known.tensor.dtype, known.tensor.shape) == (entry.dtype, entry.shape):
                continue
            delta = deltas.get(known.version, {}).get(entry.name) if known else None
            yield self._delta_job(known, delta) if known and delta and self._can_step(known, delta) else self._full_job(entry)

    def _can_step(self, known: Known, entry: TensorEntry) -> bool:
        is_same_form = (known.tensor.dtype, known.tensor.shape) == (entry.dtype, entry.shape) and entry.dtype in STEPPED_DTYPES
        is_smaller = 0 < entry.size < len(known.tensor.buffer)
        return entry.kind == DELTA and is_same_form and is_smaller and known.hash == entry.base_hash and not self._wrong[entry.name]

    def _delta_job(self, known: Known, entry: TensorEntry) -> Job:
        result = self._buffer(entry.name, len(known.tensor.buffer))
        return Job(entry, known, np.empty(entry.size, np.uint8), result, entry.size)

    def _full_job(self, entry: TensorEntry) -> Job:
        size = tensor_bytes(entry.name, entry.dtype, entry.shape)
        buffer = self._buffer(entry.name, size)
        return Job(entry, None, buffer, buffer, size)

    def _buffer(self, name: str, size: int) -> NDArray[np.uint8]:
        spare = self._spare.pop(name, None)
        if spare is not None and len(spare) == size and spare.flags.writeable:
            return spare
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            raise WeightsError(f"no memory for the {size} bytes of tensor {name!r}", retryable=False) from None

    def learn(self, job: Job, target: Target) -> None:
        """A tensor is verified."""
        if self.lineage != target.lineage:
            self._enter(target.lineage)
        self.num_verified += 1
        tensor = Tensor(job.entry.dtype, tuple(job.entry.shape), job.result)
        self.known[job.entry.name] = Known(target.version, job.entry.hash, tensor)

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

    def finish(self, manifests: Sequence[Manifest], target: Target) -> Weights:
        entries = [entry for manifest in manifests for entry in manifest.tensors]
        tensors = {entry.name: self.known[entry.name].tensor for entry in entries}
        hashes = {entry.name: entry.hash for entry in entries}
        for manifest in manifests:
            if version_digest({entry.name: tensors[entry.name] for entry in manifest.tensors}, hashes) != manifest.digest:
                raise WrongDigest(f"version {target.version}: the digest of its tensors is not the one that their publisher says")
        digest = manifests[0].digest if len(manifests) == 1 else version_digest(tensors, hashes)
        return Weights(target.lineage, target.version, digest, tensors, hashes)


def check_parts(parts: Sequence[Manifest], max_bytes: int) -> None:
    """Raise WeightsError when the parts of a version are larger than max_bytes together, or have a name twice."""
    entries = [entry for part in parts for entry in part.tensors]
    version = parts[0].version
    if sum(tensor_bytes(entry.name, entry.dtype, entry.shape) for entry in entries) > max_bytes:
        raise WeightsError(f"version {version} is larger than the {max_bytes} bytes that this puller accepts", retryable=False)
    twice = next((name for name, count in Counter(entry.name for entry in entries).items() if count > 1), None)
    if twice is not None:
        raise WeightsError(f"version {version}: tensor {twice!r} is served by two publishers, or twice by one", retryable=False)

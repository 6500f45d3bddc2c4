"""The versions that a publisher can serve: one full copy of its tensors and the deltas that led to it.

    publish(v+1)   for each tensor: diff against the full copy -> delta v..v+1, the copy becomes v+1
                   visible at once when the last tensor is done; until then v is the newest
    manifest(b)    deltas b..newest: the merge of the chain, made on first request, kept for the pair
    read(...)      bytes of a delta, or of the full copy as long as it is what the manifest said

A delta is immutable, so whoever reads one reads it whole. The full copy moves on: a tensor of it that was lent to a reader is
replaced instead of overwritten. What it was is there for as long as somebody goes on reading it, so that a tensor can be pulled that
takes longer than a version lasts; then it is gone.
"""

import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimebus.errors import WeightsError
from slimebus.weights import codec
from slimebus.weights.merges import Delta, Merges, Step
from slimebus.weights.messages import BAD_CHUNK, DELTA, FULL, NO_VERSION_YET, SAME, Manifest, TensorEntry, VersionGone
from slimebus.weights.stages import Stages
from slimebus.weights.tensors import (
    DTYPE_BYTES,
    NO_BASE,
    STEPPED_DTYPES,
    Tensor,
    TensorChanges,
    TensorLike,
    as_tensor,
    hash_bytes,
    version_digest,
)

LENT_S = 2.0
"""A tensor that was read so recently is taken to be in the middle of a pull."""


@dataclass(frozen=True)
class VersionInfo:
    """What a publish made. Fractions and bytes are of this store's tensors; delta_bytes is what a worker one behind pulls.

    encode_s: what the publish took; stage_s: seconds of work in it, `diff`, `encode` and `hash`, of all threads together.
    """

    lineage: str
    version: int
    digest: str
    hashes: Mapping[str, str]
    num_values: int
    num_changed: int
    total_bytes: int
    delta_bytes: int
    encode_s: float
    stage_s: Mapping[str, float]

    @property
    def changed_fraction(self) -> float:
        return self.num_changed / max(1, self.num_values)


@dataclass
class _Held:
    """A tensor of the full copy. changed_at: the version that last changed it; lent: a reader may still look at the buffer."""

    tensor: Tensor
    hash: str
    changed_at: int
    lent: bool = False
    is_changing: bool = False
    read_at: float = 0.0


@dataclass
class _Former:
    """What a tensor was from version `first` to before version `until`, kept while it is being read."""

    buffer: NDArray[np.uint8]
    first: int
    until: int
    read_at: float


class _Seen(NamedTuple):
    """What readers are told of: the newest complete version, and those before it whose tensors have the same names and forms."""

    newest: VersionInfo
    tensors: Mapping[str, Tensor]  # buffers are the full copy's; only dtype and shape are read here
    steps: tuple[Step, ...]  # oldest first, without gaps, the last one leads to newest
    before: tuple[VersionInfo, ...] = ()  # oldest first, without gaps

    def at(self, version: int) -> "_Seen":
        """As it was when `version` was the newest, where that is known."""
        age = self.newest.version - version
        return _Seen(self.before[-age], self.tensors, self.steps[:-age]) if 0 < age <= len(self.before) else self


class _Taken(NamedTuple):
    """What became of one published tensor. One that changed and has no delta travels whole."""

    name: str
    num_changed: int
    delta: Delta | None = None
    is_whole: bool = False


class VersionStore:
    """Publish from one thread, serve from others. keep: how many versions back a worker may be and still get a delta.

    lineage: the trainer's, shared by all publishers of a model; random when not given. threads: tensors, and units of a large one,
    diffed at once, and tensors merged.
    """

    def __init__(self, *, keep: int = 8, lineage: str | None = None, first_version: int = 0, zstd: bool = True, threads: int = 1) -> None:
        if keep < 1:
            raise WeightsError(f"keep is {keep}; a store keeps at least the delta of 1 version", retryable=False)
        self.keep, self.lineage, self._zstd = keep, lineage or secrets.token_hex(8), zstd
        self._next_version = first_version
        self._held: dict[str, _Held] = {}
        self._former: dict[str, _Former] = {}
        self._sweeper: threading.Timer | None = None
        self._seen: _Seen | None = None
        self._merges = Merges(zstd, threads)
        self._lock = threading.Lock()  # short: the maps above
        self._publishing = threading.Lock()
        self._stages = Stages()
        self._pool = ThreadPoolExecutor(threads, "weights-diff") if threads > 1 else None
        self._units = ThreadPoolExecutor(threads, "weights-unit") if threads > 1 else None  # who waits for a unit has no place here

    @property
    def newest(self) -> VersionInfo | None:
        """The newest complete version; None before the first publish."""
        seen = self._seen
        return seen.newest if seen else None

    @property
    def next_version(self) -> int:
        """The number of the version that the next publish makes."""
        return self._next_version

    # --- publishing ---

    def publish(self, tensors: Mapping[str, TensorLike | TensorChanges], *, version: int | None = None) -> VersionInfo:
        """Make these tensors, all of this publisher's, the newest version; they are read, not kept.

        version: must be the next one (a check for callers that count themselves). Raises WeightsError with nothing changed when
        a tensor's dtype, shape and size disagree, or changes are not of the newest version. A failure in the middle forgets the
        full copy: the next publish starts anew.
        """
        with self._publishing:
            given = {name: self._checked(name, value) for name, value in tensors.items()}
            if version is not None and version != self._next_version:
                raise WeightsError(f"publish of version {version}; the next one here is {self._next_version}", retryable=False)
            try:
                return self._publish(given, self._next_version)
            except BaseException:
                self._forget()
                raise

    def _checked(self, name: str, value: TensorLike | TensorChanges) -> Tensor | TensorChanges:
        if not isinstance(value, TensorChanges):
            return as_tensor(name, value)
        newest, held = self.newest, self._held.get(name)
        if newest is None or held is None or (value.base, value.dtype, value.shape) != (newest.version, *held.tensor[:2]):
            here = f"version {newest.version} of {held.tensor[:2]}" if newest and held else "no such tensor"
            wanted = f"version {value.base} of {(value.dtype, value.shape)}"
            raise WeightsError(f"tensor {name!r} as changes of {wanted}; here is {here}; publish it whole", retryable=False)
        return value

    def _publish(self, given: Mapping[str, Tensor | TensorChanges], version: int) -> VersionInfo:
        started, self._stages = time.perf_counter(), Stages()
        each = self._pool.map if self._pool else map
        taken = list(each(lambda item: self._take(item[0], item[1], version), given.items()))
        return self._show(given, taken, version, started)

    def _take(self, name: str, tensor: Tensor | TensorChanges, version: int) -> _Taken:
        """Move one tensor of the full copy on."""
        if isinstance(tensor, TensorChanges):
            return self._step(name, self._held[name], tensor, version)
        held = self._held.get(name)
        if held is None or (held.tensor.dtype, held.tensor.shape) != (tensor.dtype, tensor.shape):
            return self._replace(name, tensor, version)
        if tensor.dtype in STEPPED_DTYPES:
            return self._step(name, held, tensor, version)
        if hash_bytes(tensor.buffer) == held.hash:  # comparing the arrays would take as much memory again
            return _Taken(name, 0)
        return self._replace(name, tensor, version)

    def _replace(self, name: str, tensor: Tensor, version: int) -> _Taken:
        copy = Tensor(tensor.dtype, tensor.shape, tensor.buffer.copy())
        entry = _Held(copy, self._hash(copy.buffer), version)
        with self._lock:
            self._keep_former(name, version)
            self._held[name] = entry
        return _Taken(name, _num_values(tensor), is_whole=True)

    def _step(self, name: str, held: _Held, tensor: Tensor | TensorChanges, version: int) -> _Taken:
        base_hash = held.hash
        with self._lock:
            self._keep_former(name, version)
            held.is_changing = True
            was_lent, held.lent = held.lent, False
        if was_lent:
            held.tensor = held.tensor._replace(buffer=held.tensor.buffer.copy())
        if isinstance(tensor, TensorChanges):
            with self._stages("encode"):
                encoded = codec.encode_changes(held.tensor.steps, tensor.units, zstd=self._zstd)
        else:
            encoded = codec.encode(held.tensor.steps, tensor.steps, update=True, zstd=self._zstd, pool=self._units, stages=self._stages)
        if encoded.num_changed:
            held.hash = self._hash(held.tensor.buffer)
        with self._lock:
            held.changed_at = version if encoded.num_changed else held.changed_at
            held.is_changing = False
            if not encoded.num_changed and name in self._former and self._former[name].until == version:
                del self._former[name]
        if not encoded.num_changed:
            return _Taken(name, 0)
        if len(encoded.payload) >= len(held.tensor.buffer):
            return _Taken(name, encoded.num_changed, is_whole=True)
        return _Taken(name, encoded.num_changed, Delta(encoded.payload, self._hash(encoded.payload), encoded.num_changed, base_hash))

    def _hash(self, buffer: Any) -> str:
        with self._stages("hash"):
            return hash_bytes(buffer)

    def _keep_former(self, name: str, version: int) -> None:
        """The lock is held. A tensor that is about to change at `version` stays readable as what it was, if somebody is reading it."""
        held, former, now = self._held.get(name), self._former.get(name), time.monotonic()
        if held is None or not held.lent or now - held.read_at > LENT_S or (former and now - former.read_at <= LENT_S):
            return
        self._former[name] = _Former(held.tensor.buffer, held.changed_at, version, held.read_at)
        if self._sweeper is None:
            self._sweep_later()

    def _sweep_later(self) -> None:
        self._sweeper = threading.Timer(LENT_S, self._sweep)
        self._sweeper.daemon = True
        self._sweeper.start()

    def _sweep(self) -> None:
        """Let go of what nobody reads any more."""
        with self._lock:
            oldest = time.monotonic() - LENT_S
            self._former = {name: former for name, former in self._former.items() if former.read_at > oldest}
            self._sweeper = None
            if self._former:
                self._sweep_later()

    def _show(self, given: Mapping[str, Tensor | TensorChanges], taken: list[_Taken], version: int, started: float) -> VersionInfo:
        """Let readers see the version, all of it at once."""
        with self._lock:
            for name in self._held.keys() - given.keys():
                del self._held[name]
            tensors = {name: self._held[name].tensor for name in given}
            hashes = {name: self._held[name].hash for name in given}
        step = Step(version, {t.name: t.delta for t in taken if t.delta}, frozenset(t.name for t in taken if t.is_whole))
        newest = VersionInfo(
            lineage=self.lineage,
            version=version,
            digest=version_digest(tensors, hashes),
            hashes=hashes,
            num_values=sum(map(_num_values, tensors.values())),
            num_changed=sum(t.num_changed for t in taken),
            total_bytes=sum(len(t.buffer) for t in tensors.values()),
            delta_bytes=sum(len(d.payload) for d in step.deltas.values()) + sum(len(tensors[name].buffer) for name in step.whole),
            encode_s=time.perf_counter() - started,
            stage_s=self._stages.seconds,
        )
        with self._lock:
            self._seen = self._after(self._seen, newest, tensors, step)
            self._next_version = version + 1
        self._merges.forget(before=version - 1)
        return newest

    def _after(self, seen: _Seen | None, newest: VersionInfo, tensors: Mapping[str, Tensor], step: Step) -> _Seen:
        if seen is None:
            return _Seen(newest, tensors, ())
        steps = (*seen.steps, step)[-self.keep :]
        is_of_one_form = _forms(tensors) == _forms(seen.tensors)
        return _Seen(newest, tensors, steps, (*seen.before, seen.newest)[-self.keep :] if is_of_one_form else ())

    def _forget(self) -> None:
        with self._lock:
            self._held, self._former, self._seen = {}, {}, None
        self._merges.forget()

    # --- serving ---

    def manifest(self, have_lineage: str, have_version: int, want: int = NO_BASE) -> Manifest:
        """What leads from a version to the newest, or to the older one `want` where that is known. It may take the time of a merge.

        Raises WeightsError before the first publish.
        """
        seen = self._require_seen()
        if have_lineage == self.lineage and self._oldest_base(seen) <= have_version <= want:
            seen = seen.at(want)
        newest = seen.newest
        if have_lineage != self.lineage or not self._oldest_base(seen) <= have_version <= newest.version:
            entries = [self._full_entry(seen, name) for name in seen.tensors]
            return Manifest(lineage=self.lineage, version=newest.version, digest=newest.digest, tensors=entries)
        steps = seen.steps[len(seen.steps) - (newest.version - have_version) :]
        deltas = self._merges.between(have_version, newest.version, steps, seen.tensors)
        touched = {name for step in steps for name in (*step.deltas, *step.whole)}
        entries = [self._entry(seen, name, deltas.get(name), name in touched) for name in seen.tensors]
        return Manifest(lineage=self.lineage, version=newest.version, digest=newest.digest, tensors=entries, base=have_version)

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        """The payload of a tensor as a manifest of that version named it. It stays what it is for as long as it is held.

        Raises VersionGone when it can no longer be had.
        """
        seen = self._require_seen()
        if lineage != self.lineage or version > seen.newest.version:
            newest = f"{seen.newest.version} of {self.lineage}"
            raise VersionGone(f"version {version} of lineage {lineage} is not here; the newest is {newest}")
        if base != NO_BASE:
            return memoryview(self._find_delta(seen, version, name, base).payload)
        with self._lock:
            held, former, now = self._held.get(name), self._former.get(name), time.monotonic()
            if held is not None and not held.is_changing and held.changed_at <= version:
                held.lent, held.read_at = True, now
                return held.tensor.buffer.data
            if former is not None and former.first <= version < former.until:
                former.read_at = now
                return former.buffer.data
            raise VersionGone(f"tensor {name!r} has changed since version {version}")

    def _require_seen(self) -> _Seen:
        seen = self._seen
        if seen is None:
            raise WeightsError("no version has been published yet", code=NO_VERSION_YET)
        return seen

    def _oldest_base(self, seen: _Seen) -> int:
        return seen.newest.version - len(seen.steps)

    def _find_delta(self, seen: _Seen, version: int, name: str, base: int) -> Delta:
        deltas = self._merges.find(base, version)
        if base == version - 1:
            deltas = next((step.deltas for step in seen.steps if step.version == version), {})
        if name not in deltas:
            raise VersionGone(f"the delta of {name!r} from version {base} to {version} is no longer kept")
        return deltas[name]

    def _full_entry(self, seen: _Seen, name: str) -> TensorEntry:
        tensor, tensor_hash = seen.tensors[name], seen.newest.hashes[name]
        return TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, hash=tensor_hash, kind=FULL, size=len(tensor.buffer))

    def _entry(self, seen: _Seen, name: str, delta: Delta | None, is_touched: bool) -> TensorEntry:
        if is_touched and delta is None:
            return self._full_entry(seen, name)
        tensor, tensor_hash = seen.tensors[name], seen.newest.hashes[name]
        if delta is None:
            return TensorEntry(name=name, dtype=tensor.dtype, shape=tensor.shape, hash=tensor_hash, kind=SAME)
        return TensorEntry(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            hash=tensor_hash,
            kind=DELTA,
            size=len(delta.payload),
            num_changed=delta.num_changed,
            payload_hash=delta.payload_hash,
            base_hash=delta.base_hash,
        )


def slice_payload(payload: memoryview, offset: int, length: int, name: str) -> memoryview:
    """The asked bytes of a payload. Raises WeightsError where they do not lie in it."""
    if offset < 0 or length < 0 or offset + length > len(payload):
        raise WeightsError(f"bytes {offset} to {offset + length} of {name!r}, which has {len(payload)}", code=BAD_CHUNK, retryable=False)
    return payload[offset : offset + length]


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _num_values(tensor: Tensor) -> int:
    return len(tensor.buffer) // DTYPE_BYTES[tensor.dtype]

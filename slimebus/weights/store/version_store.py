"""The versions that a publisher can serve: one full copy of its tensors and the deltas that led to it.

    publish(v+1)   for each tensor: diff against the full copy -> delta v..v+1, the copy becomes v+1
                   visible at once when the last tensor is done; until then v is the newest
    manifest(b)    deltas b..newest: the merge of the chain, made on first request, kept for the pair
    read(...)      bytes of a delta, or of the full copy as long as it is what the manifest said

A delta is immutable, so it is always read whole. The full copy moves on: a tensor of it that was lent to a reader is
replaced instead of overwritten. What it was is there for as long as somebody goes on reading it, so that a tensor can be pulled that
takes longer than a version lasts; then it is gone.
"""

import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.codec import delta_codec
from slimebus.weights.messages import DELTA, FULL, SAME, Manifest, TensorEntry, VersionGone
from slimebus.weights.tensors import NO_BASE, STEPPED_DTYPES, Tensor, TensorForm, TensorLike, as_tensor, checksum, digest_of, hash_bytes
from slimebus.weights.threads import Stages, Threads

KEPT_FRACTION = 0.5
"""Of the model's size: what merged deltas take at most. Who pulls an evicted one asks for the manifest again, which merges it again."""


class Delta(NamedTuple):
    """A tensor's steps from one version to a later one. base_hash: what the tensor hashes to before them."""

    payload: bytes
    payload_hash: str
    num_changed: int
    base_hash: str

    @classmethod
    def from_encoded(cls, encoded: delta_codec.Encoded, base_hash: str) -> "Delta":
        return cls(encoded.payload, checksum(encoded.payload), encoded.num_changed, base_hash)


def entry_of(form: TensorForm, delta: Delta | None, *, is_changed: bool) -> TensorEntry:
    """The tensor in a manifest. One that changed and has no delta travels whole."""
    if delta is not None:
        return TensorEntry(*form, DELTA, len(delta.payload), delta.num_changed, delta.payload_hash, delta.base_hash)
    return TensorEntry(*form, FULL, form.size) if is_changed else TensorEntry(*form, SAME)


Step = Mapping[str, Delta | None]
"""The tensors that changed from one version to the next. None: it travels whole."""


class DeltaCache:
    """The merged deltas of pairs of versions that were asked for lately. One merge is made at a time, of so many tensors at once."""

    def __init__(self, threads: int) -> None:
        self._threads = Threads(threads, "weights-merge")
        self._kept: dict[tuple[int, int], Mapping[str, Delta]] = {}
        self._lock = threading.Lock()  # short: the map above
        self._merging = threading.Lock()

    def between(self, base: int, version: int, steps: Sequence[Step], forms: Sequence[TensorForm]) -> Mapping[str, Delta]:
        """The deltas of `steps`, which lead from base to version, as one. Tensors that changed and are not in it travel whole."""
        if len(steps) <= 1:
            return {name: delta for step in steps for name, delta in step.items() if delta}
        with self._merging:
            merged = self.find(base, version)
            if not merged:
                merged, limit_bytes = self._merge(steps, forms), KEPT_FRACTION * sum(form.size for form in forms)
                with self._lock:
                    self._kept[base, version] = merged
                    while len(self._kept) > 1 and sum(len(d.payload) for kept in self._kept.values() for d in kept.values()) > limit_bytes:
                        del self._kept[next(iter(self._kept))]  # the one that was not used for the longest time
            return merged

    def find(self, base: int, version: int) -> Mapping[str, Delta]:
        """The deltas of this pair, empty when they are not kept."""
        with self._lock:
            found = self._kept.pop((base, version), {})
            if found:
                self._kept[base, version] = found  # the last one used goes last
            return found

    def forget(self, *, before: int | None = None) -> None:
        """Drop all, or those that lead to versions before this one."""
        with self._lock:
            self._kept = {pair: deltas for pair, deltas in self._kept.items() if before is not None and pair[1] >= before}

    def _merge(self, steps: Sequence[Step], forms: Sequence[TensorForm]) -> Mapping[str, Delta]:
        def merge(form: TensorForm) -> Delta | None:
            chain = [step[form.name] for step in steps if form.name in step]
            deltas = [delta for delta in chain if delta]
            if len(deltas) < len(chain) or len(chain) < 2:
                return deltas[0] if len(deltas) == len(chain) == 1 else None
            return Delta.from_encoded(delta_codec.merge([delta.payload for delta in deltas], form.num_values), deltas[0].base_hash)

        merged = zip(forms, self._threads.map(merge, forms), strict=True)
        return {form.name: delta for form, delta in merged if delta and len(delta.payload) < form.size}


READ_GRACE_S = 2.0
"""A tensor that was read so recently is changes to be in the middle of a pull."""
NEVER = float("-inf")


@dataclass(frozen=True)
class VersionInfo:
    """What a publish made. Fractions and bytes are of this store's tensors; delta_bytes is what a worker one behind pulls.

    encode_s: what the publish took; stage_s: seconds of work in it, `diff`, `encode` and `hash`, of all threads together.
    """

    lineage: str
    version: int
    digest: str
    forms: tuple[TensorForm, ...]
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
class _StoredTensor:
    """What a tensor is from version `first` to before version `until`. read_at: when a reader last took it, and may still look at it."""

    tensor: Tensor
    hash: str
    first: int
    until: float = float("inf")
    read_at: float = NEVER

    def form_of(self, name: str) -> TensorForm:
        return TensorForm(name, self.tensor.dtype, self.tensor.shape, self.hash)

    @property
    def is_being_read(self) -> bool:
        return time.monotonic() - self.read_at <= READ_GRACE_S


class _Published(NamedTuple):
    """A complete version and the step that led to it."""

    info: VersionInfo
    step: Step


class _TensorChange(NamedTuple):
    """What became of a published tensor that changed. Without a delta it travels whole."""

    num_changed: int
    delta: Delta | None = None


class VersionStore:
    """Publish from one thread, serve from others. keep: how many versions back a worker may be and still get a delta.

    lineage: the trainer's, shared by all publishers of a model; random when not given. threads: tensors, and units of a large one,
    diffed at once, and tensors merged.
    """

    def __init__(self, *, keep: int = 8, lineage: str | None = None, first_version: int = 0, threads: int = 1) -> None:
        if keep < 1:
            raise FatalWeightsError(f"keep is {keep}; a store keeps at least the delta of 1 version")
        self.keep, self.lineage = keep, lineage or secrets.token_hex(8)
        self.next_version = first_version
        """The number of the version that the next publish makes."""
        self._stored: dict[str, _StoredTensor] = {}
        self._superseded: dict[str, _StoredTensor] = {}
        self._forget_timer: threading.Timer | None = None
        self._history: tuple[_Published, ...] = ()  # oldest first, without gaps; replaced, never changed
        self._manifests: dict[tuple[int, int], Manifest] = {}
        self._deltas = DeltaCache(threads)
        self._lock = threading.RLock()  # short: the maps above
        self._publishing = threading.Lock()
        self._stages = Stages()
        self._threads, self._unit_threads = Threads(threads, "weights-diff"), Threads(threads, "weights-unit")

    @property
    def newest(self) -> VersionInfo | None:
        """The newest complete version; None before the first publish."""
        history = self._history
        return history[-1].info if history else None

    # --- publishing ---

    def publish(self, tensors: Mapping[str, TensorLike], *, version: int | None = None) -> VersionInfo:
        """Make these tensors, all of this publisher's, the newest version; they are read, not kept.

        version: must be the next one (a check for callers that count themselves). Raises WeightsError with nothing changed when
        a tensor's dtype, shape and size disagree. A failure in the middle forgets the
        full copy: the next publish starts anew.
        """
        with self._publishing:
            given = {name: as_tensor(name, value) for name, value in tensors.items()}
            if version is not None and version != self.next_version:
                raise FatalWeightsError(f"publish of version {version}; the next one here is {self.next_version}")
            started, self._stages = time.perf_counter(), Stages()
            try:
                changes = self._threads.map(lambda one: self._update_tensor(*one), list(given.items()))
                return self._make_visible(dict(zip(given, changes, strict=True)), started)
            except BaseException:
                self._forget()
                raise

    def _update_tensor(self, name: str, tensor: Tensor) -> _TensorChange | None:
        """Move one tensor of the full copy on; None when it is the same."""
        stored = self._stored.get(name)
        is_same_form = stored is not None and (stored.tensor.dtype, stored.tensor.shape) == (tensor.dtype, tensor.shape)
        if stored is not None and is_same_form and tensor.dtype in STEPPED_DTYPES:
            return self._encode_change(name, stored, tensor)
        if stored is None or not is_same_form or hash_bytes(tensor.buffer) != stored.hash:  # comparing would take as much memory again
            copy = tensor._replace(buffer=tensor.buffer.copy())
            self._store(name, _StoredTensor(copy, self._hash(copy.buffer), self.next_version))
            return _TensorChange(tensor.num_values)
        return None

    def _encode_change(self, name: str, stored: _StoredTensor, tensor: Tensor) -> _TensorChange | None:
        """In place, unless somebody may still look at the buffer. Meanwhile nobody can read it as an older version."""
        changing = replace(stored, first=self.next_version, read_at=NEVER)
        superseded = self._store(name, changing)
        if stored.read_at != NEVER:
            changing.tensor = stored.tensor._replace(buffer=stored.tensor.buffer.copy())
        steps, stages = changing.tensor.steps, self._stages
        encoded = delta_codec.encode(steps, tensor.steps, update=True, threads=self._unit_threads, stages=stages)
        if not encoded.num_changed:
            with self._lock:
                changing.first = stored.first
                if superseded is stored:
                    del self._superseded[name]
            return None
        changing.hash = self._hash(changing.tensor.buffer)
        is_smaller = len(encoded.payload) < len(tensor.buffer)
        return _TensorChange(encoded.num_changed, Delta.from_encoded(encoded, stored.hash) if is_smaller else None)

    def _hash(self, buffer: Any) -> str:
        with self._stages("hash"):
            return hash_bytes(buffer)

    def _store(self, name: str, newer: _StoredTensor) -> _StoredTensor | None:
        """In the tensor's place, which stays readable as what it was if somebody is reading it; what is kept so."""
        with self._lock:
            stored, superseded = self._stored.get(name), self._superseded.get(name)
            self._stored[name] = newer
            if stored is not None and stored.is_being_read and not (superseded and superseded.is_being_read):
                stored.until = newer.first
                self._superseded[name] = superseded = stored
                if self._forget_timer is None:
                    self._forget_superseded()
            return superseded

    def _forget_superseded(self) -> None:
        """Let go of what nobody reads any more, and look again later while anything is left."""
        with self._lock:
            self._superseded = {name: superseded for name, superseded in self._superseded.items() if superseded.is_being_read}
            self._forget_timer = threading.Timer(READ_GRACE_S, self._forget_superseded) if self._superseded else None
            if self._forget_timer is not None:
                self._forget_timer.daemon = True
                self._forget_timer.start()

    def _make_visible(self, changes: Mapping[str, _TensorChange | None], started: float) -> VersionInfo:
        """Let readers see the version, all of it at once."""
        version = self.next_version
        with self._lock:
            self._stored = {name: self._stored[name] for name in changes}
            forms = tuple(stored.form_of(name) for name, stored in self._stored.items())
        step = {name: t.delta for name, t in changes.items() if t}
        newest = VersionInfo(
            lineage=self.lineage,
            version=version,
            digest=digest_of(forms),
            forms=forms,
            num_values=sum(form.num_values for form in forms),
            num_changed=sum(t.num_changed for t in changes.values() if t),
            total_bytes=sum(form.size for form in forms),
            delta_bytes=sum(len(d.payload) if (d := step[form.name]) else form.size for form in forms if form.name in step),
            encode_s=time.perf_counter() - started,
            stage_s=self._stages.seconds,
        )
        with self._lock:
            self._history = (*self._history, _Published(newest, step))[-self.keep - 1 :]
            self.next_version = version + 1
        self._deltas.forget(before=version - 1)
        return newest

    def _forget(self) -> None:
        with self._lock:
            self._stored, self._superseded, self._history, self._manifests = {}, {}, (), {}
        self._deltas.forget()

    def restore(self, version: int) -> dict[str, Tensor]:
        """The tensors of a kept version, copies, each with the hash that it was published with; a publish waits meanwhile.

        The deltas since then are changes back from the full copy. Raises VersionGone when the version is no longer kept, or a tensor has
        since changed in a way that kept no steps.
        """
        with self._publishing:
            history = {made.info.version: made for made in self._history}
            if version not in history:
                raise VersionGone(f"version {version} is no longer kept")
            since = [made.step for number, made in history.items() if number > version]
            return {form.name: self._rebuild_tensor(form, since, version) for form in history[version].info.forms}

    def _rebuild_tensor(self, form: TensorForm, since: Sequence[Step], version: int) -> Tensor:
        stored = self._stored[form.name].tensor
        made = stored._replace(buffer=stored.buffer.copy())
        deltas = [step[form.name] for step in since if form.name in step]
        payloads = [delta.payload for delta in deltas if delta]
        if len(payloads) < len(deltas) or (payloads and not delta_codec.undo(payloads, made.steps)) or hash_bytes(made.buffer) != form.hash:
            raise VersionGone(f"tensor {form.name!r} has changed since version {version}, and its steps were not kept")
        return made

    # --- serving ---

    def manifest(self, have_lineage: str, have_version: int, want: int = NO_BASE) -> Manifest:
        """What leads from a version to the newest, or to the older one `want` where that is known. It may take the time of a merge.

        Raises WeightsError before the first publish.
        """
        history = self._require_history()
        oldest, newest = history[0].info.version, history[-1].info.version
        is_base_kept = have_lineage == self.lineage and oldest <= have_version <= newest
        version = want if is_base_kept and have_version <= want < newest else newest
        of = (have_version if is_base_kept else NO_BASE, version)
        is_merged = 0 <= of[0] < version - 1  # its deltas may have made room for others: then they are merged again
        found = self._manifests.get(of)
        if found is None or (is_merged and not self._deltas.find(*of)):
            found = self._make_manifest(history[: version - oldest + 1], of[0])
            with self._lock:
                self._manifests = {key: made for key, made in self._manifests.items() if key[1] >= newest - 1} | {of: found}
        return found

    def _make_manifest(self, history: tuple[_Published, ...], base: int) -> Manifest:
        """To the last one of these versions."""
        info = history[-1].info
        steps = [] if base == NO_BASE else [made.step for made in history if made.info.version > base]
        deltas = self._deltas.between(base, info.version, steps, info.forms)
        changed = set[str]().union(*steps)
        entries = [entry_of(f, deltas.get(f.name), is_changed=base == NO_BASE or f.name in changed) for f in info.forms]
        return Manifest(lineage=self.lineage, version=info.version, digest=info.digest, tensors=entries, base=base)

    def read(self, lineage: str, version: int, name: str, base: int) -> memoryview:
        """The payload of a tensor as a manifest of that version named it. It stays what it is for as long as it is stored.

        Raises VersionGone when it is no longer stored.
        """
        history = self._require_history()
        newest = history[-1].info.version
        if lineage != self.lineage or version > newest:
            raise VersionGone(f"version {version} of lineage {lineage} is not here; the newest is {newest} of {self.lineage}")
        if base != NO_BASE:
            return memoryview(self._find_delta(history, version, name, base).payload)
        with self._lock:
            for place in (self._stored, self._superseded):
                kept = place.get(name)
                if kept is not None and kept.first <= version < kept.until:
                    kept.read_at = time.monotonic()
                    return kept.tensor.buffer.data
        raise VersionGone(f"tensor {name!r} has changed since version {version}")

    def _require_history(self) -> tuple[_Published, ...]:
        history = self._history
        if not history:
            raise WeightsError("no version has been published yet", code="no_version")
        return history

    def _find_delta(self, history: tuple[_Published, ...], version: int, name: str, base: int) -> Delta:
        steps: dict[int, Step] = {made.info.version: made.step for made in history[1:]} if base == version - 1 else {}
        delta = steps.get(version, self._deltas.find(base, version)).get(name)
        if delta is None:
            raise VersionGone(f"the delta of {name!r} from version {base} to {version} is no longer kept")
        return delta

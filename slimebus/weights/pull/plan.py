"""The tensors that a pull has verified, and those that it still needs. No socket here."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slimebus.bus.errors import FatalWeightsError, WeightsError
from slimebus.weights.host.shared_folder import SharedFolder
from slimebus.weights.messages import DELTA, Manifest, TensorEntry
from slimebus.weights.tensors import NO_BASE, Target, Tensor, TensorForm, Weights, digest_of

MAX_WRONG_BYTES = 3
"""A tensor that fails its hash this often in one pull is not tried again."""


@dataclass
class KnownTensor:
    """A verified tensor and the version it is of (the newest it is known to be the same in)."""

    version: int
    form: TensorForm
    tensor: Tensor


@dataclass
class TensorDownload:
    """One payload under way: the delta from base, or without a base the tensor itself. source: the worker that it comes from, if any.

    folder: where the tensor is put; None: in this process's own memory.
    """

    entry: TensorEntry
    base: KnownTensor | None
    folder: SharedFolder | None = None
    missing_bytes: int = field(init=False)
    source: str = ""

    def __post_init__(self) -> None:
        self.form = self.entry.form
        self.size = self.missing_bytes = self.form.size if self.base is None else self.entry.size

    @functools.cached_property
    def result(self) -> NDArray[np.uint8]:
        """The buffer of the tensor. Raises WeightsError where there is no room."""
        if self.folder is not None:
            return self.folder.allocate(self.form)
        try:
            return np.empty(self.form.size, np.uint8)
        except MemoryError:
            raise FatalWeightsError(f"no memory for the {self.form.size} bytes of tensor {self.form.name!r}") from None

    @functools.cached_property
    def payload(self) -> NDArray[np.uint8]:
        """The buffer of the payload; without a base it is the tensor."""
        return self.result if self.base is None else np.empty(self.size, np.uint8)

    @property
    def base_version(self) -> int:
        """The version that the payload leads from; NO_BASE for the tensor itself."""
        return self.base.version if self.base else NO_BASE

    def write(self, offset: int, frame: memoryview) -> None:
        """Put a piece in its place."""
        self.payload[offset : offset + len(frame)] = np.frombuffer(frame, np.uint8)
        self.missing_bytes -= len(frame)


class PullPlan:
    """What one pull knows so far. It outlives the rounds, so that verified tensors are never fetched twice.

    folder: where its tensors come to be; None: in this process's own memory.
    """

    def __init__(self, have: Weights | None, *, folder: SharedFolder | None = None, counts: Counter[str] | None = None) -> None:
        self.have, self.folder, self.counts = have, folder, Counter[str]() if counts is None else counts
        self.lineage = have.lineage if have else ""
        self.known = {form.name: KnownTensor(have.version, form, have.tensors[form.name]) for form in have.forms} if have else {}
        self.num_verified = 0
        self.past_sources: set[str] = set()
        """Workers that have gone on to a newer version."""
        self._wrong: Counter[str] = Counter()

    def bases(self, entries: Iterable[TensorEntry] | None = None) -> list[int]:
        """The versions that tensors are known of, NO_BASE for those that are not; of all that are known, or of these."""
        names = self.known if entries is None else [entry.name for entry in entries]
        return sorted({self.known[name].version if name in self.known else NO_BASE for name in names}) or [NO_BASE]

    def has(self, entry: TensorEntry) -> bool:
        """Whether the tensor is known as the entry says it is."""
        known = self.known.get(entry.name)
        return known is not None and known.form == entry.form

    def lacks(self, entries: Iterable[TensorEntry]) -> list[TensorForm]:
        """The tensors that are not known as an entry says they are."""
        return [entry.form for entry in entries if not self.has(entry)]

    def check_room(self, entries: Iterable[TensorEntry]) -> None:
        """Raises WeightsError when there is no room for those of them that are missing."""
        if self.folder is not None:
            self.folder.check_room(sum(form.size for form in self.lacks(entries)))

    def missing(self, relative: Sequence[Manifest]) -> Iterator[TensorDownload]:
        """The payloads that are still missing of a part; its manifests differ only in their base."""
        deltas = {manifest.base: {entry.name: entry for entry in manifest.tensors} for manifest in relative}
        for entry in relative[0].tensors:
            if self.has(entry):
                continue
            known = self.known.get(entry.name)
            delta = deltas.get(known.version, {}).get(entry.name) if known and not self._wrong[entry.name] else None
            if known and delta and delta.kind == DELTA and known.form == delta.form._replace(hash=delta.base_hash):
                yield TensorDownload(delta, known, self.folder)
            else:
                yield TensorDownload(entry, None, self.folder)

    def keep_verified(self, download: TensorDownload, target: Target) -> None:
        """Record a verified tensor, and keep it in the folder for the other workers of this host."""
        if self.folder is not None:
            self.folder.keep(download.form, download.result)
        self.record_verified(download.form, download.result, target)

    def record_verified(self, form: TensorForm, buffer: NDArray[np.uint8], target: Target) -> None:
        """Record a verified tensor, wherever it came from."""
        if self.lineage != target.lineage:
            self._enter_lineage(target.lineage)
        self.num_verified += 1
        self.known[form.name] = KnownTensor(target.version, form, Tensor(form.dtype, form.shape, buffer))

    def note_wrong(self, entry: TensorEntry, target: Target) -> None:
        """Raises WeightsError when it was wrong too often."""
        self._wrong[entry.name] += 1
        if self._wrong[entry.name] >= MAX_WRONG_BYTES:
            raise WeightsError(f"tensor {entry.name!r} of version {target.version} failed its checksum {MAX_WRONG_BYTES} times")

    def _enter_lineage(self, lineage: str) -> None:
        """Versions of another lineage are no base any more; their tensors still serve where the hashes agree."""
        self.lineage = lineage
        for known in self.known.values():
            known.version = NO_BASE

    def for_next_pull(self) -> "PullPlan":
        """The plan for another pull: what is verified is known, what was wrong, or elsewhere, may be right by then."""
        self._wrong.clear()
        self.past_sources.clear()
        return self

    def finish(self, entries: Sequence[TensorEntry], target: Target) -> Weights:
        """The version of these tensors, all of them known."""
        tensors = {entry.name: self.known[entry.name].tensor for entry in entries}
        hashes = {entry.name: entry.hash for entry in entries}
        return Weights(target.lineage, target.version, digest_of(entry.form for entry in entries), tensors, hashes)

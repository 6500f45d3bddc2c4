"""Deltas straight from a version to the newest: the merge of the chain between, made when it is first asked for."""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from slimebus.weights.codec import delta_codec
from slimebus.weights.messages import DELTA, FULL, SAME, TensorEntry
from slimebus.weights.tensors import TensorForm, checksum
from slimebus.weights.threads import Threads

KEPT_FRACTION = 0.5
"""Of the model's size: what merged deltas take at most. Who pulls one that had to go asks for the manifest, and so for the merge, again."""


class Delta(NamedTuple):
    """A tensor's steps from one version to a later one. base_hash: what the tensor hashes to before them."""

    payload: bytes
    payload_hash: str
    num_changed: int
    base_hash: str

    @classmethod
    def of(cls, encoded: delta_codec.Encoded, base_hash: str) -> "Delta":
        return cls(encoded.payload, checksum(encoded.payload), encoded.num_changed, base_hash)


def entry_of(form: TensorForm, delta: Delta | None, *, is_changed: bool) -> TensorEntry:
    """The tensor in a manifest. One that changed and has no delta travels whole."""
    if delta is not None:
        return TensorEntry(*form, DELTA, len(delta.payload), delta.num_changed, delta.payload_hash, delta.base_hash)
    return TensorEntry(*form, FULL, form.size) if is_changed else TensorEntry(*form, SAME)


class Step(NamedTuple):
    """From version - 1 to version. A changed tensor without a delta travels whole."""

    version: int
    deltas: Mapping[str, Delta]
    whole: frozenset[str]


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
            return steps[0].deltas if steps else {}
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
        whole = frozenset[str]().union(*(step.whole for step in steps))
        changed = [form for form in forms if form.name not in whole and any(form.name in step.deltas for step in steps)]

        def merge(form: TensorForm) -> Delta:
            first, *others = chain = [step.deltas[form.name] for step in steps if form.name in step.deltas]
            if not others:
                return first
            return Delta.of(delta_codec.merge([delta.payload for delta in chain], form.num_values), first.base_hash)

        merged = zip(changed, self._threads.map(merge, changed), strict=True)
        return {form.name: delta for form, delta in merged if len(delta.payload) < form.size}

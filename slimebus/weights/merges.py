"""Deltas straight from a version to the newest: the merge of the chain between, made when it is first asked for."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from slimebus.weights import codec
from slimebus.weights.tensors import Tensor, hash_bytes

KEPT_FRACTION = 0.5
"""Of the model's size: what merged deltas take at most. Who pulls one that had to go asks for the manifest, and so for the merge, again."""


class Delta(NamedTuple):
    """A tensor's steps from one version to a later one. base_hash: what the tensor hashes to before them."""

    payload: bytes
    payload_hash: str
    num_changed: int
    base_hash: str


class Step(NamedTuple):
    """From version - 1 to version. A changed tensor without a delta travels whole."""

    version: int
    deltas: Mapping[str, Delta]
    whole: frozenset[str]


class Merges:
    """The merged deltas of pairs of versions that were asked for lately. One merge is made at a time, of so many tensors at once."""

    def __init__(self, zstd: bool, threads: int = 1) -> None:
        self._zstd = zstd
        self._pool = ThreadPoolExecutor(threads, "weights-merge") if threads > 1 else None
        self._kept: dict[tuple[int, int], Mapping[str, Delta]] = {}
        self._lock = threading.Lock()  # short: the map above
        self._merging = threading.Lock()

    def between(self, base: int, version: int, steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> Mapping[str, Delta]:
        """The deltas of `steps`, which lead from base to version, as one. Tensors that changed and are not in it travel whole."""
        if len(steps) <= 1:
            return steps[0].deltas if steps else {}
        with self._merging:
            merged = self.find(base, version)
            if not merged:
                merged = self._merge(steps, tensors)
                self._keep((base, version), merged, sum(len(tensor.buffer) for tensor in tensors.values()))
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

    def _keep(self, pair: tuple[int, int], merged: Mapping[str, Delta], model_bytes: int) -> None:
        """Those that were not used for the longest time make room."""
        with self._lock:
            self._kept[pair] = merged
            sizes = {kept: sum(len(delta.payload) for delta in deltas.values()) for kept, deltas in self._kept.items()}
            room = KEPT_FRACTION * model_bytes - sum(sizes.values())
            for kept in [other for other in sizes if other != pair]:
                if room >= 0:
                    break
                del self._kept[kept]
                room += sizes[kept]

    def _merge(self, steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> Mapping[str, Delta]:
        whole = frozenset[str]().union(*(step.whole for step in steps))
        names = [name for name in tensors if name not in whole and any(name in step.deltas for step in steps)]

        def merge(name: str) -> Delta:
            chain = [step.deltas[name] for step in steps if name in step.deltas]
            if len(chain) == 1:
                return chain[0]
            encoded = codec.merge([delta.payload for delta in chain], len(tensors[name].buffer) // 2, zstd=self._zstd)
            return Delta(encoded.payload, hash_bytes(encoded.payload), encoded.num_changed, chain[0].base_hash)

        each = self._pool.map if self._pool else map
        merged = zip(names, each(merge, names), strict=True)
        return {name: delta for name, delta in merged if len(delta.payload) < len(tensors[name].buffer)}

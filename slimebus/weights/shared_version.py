"""A verified version as immutable files in shared memory: what a worker hands to its engines."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SharedTensor:
    """One tensor's bytes: little-endian, C order, in `file` from `offset` on, which is a multiple of 64. hash: xxh3_128 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    file: Path
    offset: int


@dataclass(frozen=True)
class SharedVersion:
    """A version that an engine on this machine may map. Files stay until a newer version is served, mappings longer.

    directory: the same tensors as a model directory, for engines that load from disk. A tensor that did not change since the version
    before has the same hash and the same bytes in memory.
    """

    lineage: str
    version: int
    digest: str
    directory: Path
    tensors: Mapping[str, SharedTensor]

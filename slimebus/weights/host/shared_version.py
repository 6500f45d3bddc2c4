"""A verified version as immutable files in shared memory: what a worker hands to its engines."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from slimebus.bus.errors import WeightsError
from slimebus.weights.tensors import tensor_bytes


@dataclass(frozen=True)
class SharedTensor:
    """One tensor's bytes: little-endian, C order, in `file` from `offset` on, which is a multiple of 64. hash: BLAKE3 of them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str
    file: Path
    offset: int

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.name, self.dtype, self.shape)

    def read(self) -> NDArray[np.uint8]:
        """The bytes, mapped: [size_bytes]. Raises WeightsError when the version is gone."""
        if not self.size_bytes:
            return np.empty(0, np.uint8)
        try:
            return np.memmap(self.file, np.uint8, "r", self.offset, (self.size_bytes,))
        except OSError as bad:
            raise WeightsError(f"{self.file}: {bad.strerror}; is there a newer version already?") from None


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

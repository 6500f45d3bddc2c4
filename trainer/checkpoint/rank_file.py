"""One rank's file of a checkpoint: a safetensors file of boxes of whole tensors, named KEY@OFFSET."""

import math
import os
from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from slimebus.weights.tensors import SAFETENSORS_CODES, SAFETENSORS_DTYPES, host_bytes, safetensors_header
from trainer.checkpoint.folder import RankFile, TensorPart
from trainer.checkpoint.trained_state import LocalBox

ALIGN = 64
CHUNK_BYTES = 1 << 24
"""Hashed and written at once."""


def write_rank_file(path: Path, host: str, boxes: Sequence[LocalBox]) -> RankFile:
    """Write these boxes, in host memory, durably. Raises OSError."""
    dtypes = [str(box.tensor.dtype).removeprefix("torch.") for box in boxes]
    names = [f"{box.key}@{','.join(map(str, box.offset))}" for box in boxes]
    header = safetensors_header(zip(names, dtypes, (box.shape for box in boxes), strict=True), ALIGN)
    starts = accumulate((box.tensor.nbytes for box in boxes), initial=len(header))
    parts = [
        TensorPart(box.key, box.offset, box.shape, SAFETENSORS_CODES[of], at) for box, of, at in zip(boxes, dtypes, starts, strict=False)
    ]
    hashed, size = blake3(), 0
    with path.open("wb") as file:
        for view in chain([memoryview(header)], (host_bytes(box.tensor).data for box in boxes)):
            for begin in range(0, len(view), CHUNK_BYTES):
                hashed.update(view[begin : begin + CHUNK_BYTES])
                size += file.write(view[begin : begin + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return RankFile(path.name, host, size, hashed.hexdigest(), parts)


def problem_with(path: Path, file: RankFile) -> str:
    """Why the file is not what was written, without reading it; empty when it has the right size."""
    try:
        size = path.stat().st_size
    except OSError:
        return "is missing"
    return "" if size == file.num_bytes else f"has {size} of {file.num_bytes} bytes"


def has_its_hash(path: Path, file: RankFile) -> bool:
    """Whether the content is what was written."""
    try:
        return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest() == file.blake3
    except OSError:
        return False


class OpenFile:
    """A rank's file, mapped."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, mode="c")

    def tensor(self, part: TensorPart) -> torch.Tensor:
        """A part of it, of the part's shape; not to be kept, nor written to."""
        dtype = torch_dtype(part)
        size = math.prod(part.shape) * dtype.itemsize
        return torch.from_numpy(self._bytes[part.at : part.at + size]).view(dtype).view(part.shape)


def torch_dtype(part: TensorPart) -> torch.dtype:
    """Of the part's tensor."""
    return getattr(torch, SAFETENSORS_DTYPES[part.dtype])

"""One rank's file of a checkpoint: a safetensors file whose tensors are boxes of whole tensors, named KEY@OFFSET."""

import json
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from slimebus.weights.tensors import SAFETENSORS_CODES
from trainer.checkpoint.manifest import Part, RankFile
from trainer.checkpoint.trained_state import LocalBox

ALIGN = 64
CHUNK_BYTES = 1 << 24
"""Hashed and written at once."""
CODES = {getattr(torch, name): code for name, code in SAFETENSORS_CODES.items()}
DTYPES = {code: dtype for dtype, code in CODES.items()}


def write_rank_file(path: Path, host: str, boxes: Sequence[LocalBox]) -> RankFile:
    """Write these boxes, in host memory, durably. Raises OSError."""
    parts, header, at = list[Part](), dict[str, object](), 0
    for box in boxes:
        size = box.tensor.numel() * box.tensor.element_size()
        dtype = CODES[box.tensor.dtype]
        parts.append(Part(box.key, box.offset, box.shape, dtype, at))
        name = f"{box.key}@{','.join(map(str, box.offset))}"
        header[name] = {"dtype": dtype, "shape": box.shape, "data_offsets": (at, at + size)}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    start, hashed = 8 + len(text), blake3()
    with path.open("wb") as file:
        header_bytes = memoryview(len(text).to_bytes(8, "little") + text)
        for view in chain([header_bytes], (_bytes_of(box.tensor) for box in boxes)):
            for begin in range(0, len(view), CHUNK_BYTES):
                hashed.update(view[begin : begin + CHUNK_BYTES])
                file.write(view[begin : begin + CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
    parts = [Part(part.key, part.offset, part.shape, part.dtype, start + part.at) for part in parts]
    return RankFile(path.name, host, start + at, hashed.hexdigest(), parts)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


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

    def tensor(self, part: Part) -> torch.Tensor:
        """A part of it, of the part's shape; not to be kept, nor written to."""
        dtype = DTYPES[part.dtype]
        size = int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
        return torch.from_numpy(self._bytes[part.at : part.at + size]).view(dtype).view(part.shape)

"""Changed tensors on their way to an SGLang of this host: a file in /dev/shm for as long as one call takes.

0        64       64 + size
| count  | tensors, each at a multiple of 64 bytes |       torch in the engine maps it, copies out of it and removes it

The version's own files are not given away: torch writes its count of users into what it maps.
"""

import asyncio
import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rollout.torch_payload import HEADER_BYTES, PlacedTensor, payload
from slimebus.errors import WeightsError
from slimebus.weights.shared_version import SharedTensor
from slimebus.weights.tensors import tensor_bytes

SHM = Path("/dev/shm")
"""Where shm_open looks; no other place will do."""
PREFIX = "slimebus-handoff-"
BUCKET_BYTES = 512 << 20
ALIGNMENT = 64


def size_of(tensor: SharedTensor) -> int:
    """Bytes of the tensor."""
    return tensor_bytes(tensor.name, tensor.dtype, tensor.shape)


def buckets(tensors: Iterable[SharedTensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[SharedTensor]]:
    """The tensors in turn, in lists of at most limit_bytes, or of one tensor that is larger."""
    bucket: list[SharedTensor] = []
    room = limit_bytes
    for tensor in tensors:
        if bucket and size_of(tensor) > room:
            yield bucket
            bucket, room = [], limit_bytes
        bucket.append(tensor)
        room -= size_of(tensor)
    if bucket:
        yield bucket


@contextlib.asynccontextmanager
async def handed_off(tensors: Sequence[SharedTensor], num_readers: int) -> AsyncIterator[str]:
    """A file with copies of these tensors while the block runs, as the payload that names it; what maps it may keep it longer.

    num_readers: processes that will map it. Raises WeightsError when there is no room for it in /dev/shm.
    """
    placed, size = _placed(tensors)
    file = SHM / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"  # process ids repeat: each container has its own
    with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+b", buffering=0) as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX)  # until its owner has closed it, or has ended
            try:
                await asyncio.to_thread(_write, out.fileno(), tensors, placed, size, num_readers)
            except OSError as bad:
                raise WeightsError(f"{file}: {size} bytes of weights for an engine could not be put there: {bad.strerror}") from None
            yield payload(f"/{file.name}", size, placed)
        finally:
            file.unlink(missing_ok=True)


def _write(file: int, tensors: Sequence[SharedTensor], placed: Sequence[PlacedTensor], size: int, num_readers: int) -> None:
    # Reserved first: writing to a full /dev/shm through a mapping would end this process.
    os.posix_fallocate(file, 0, HEADER_BYTES + size)
    with mmap.mmap(file, HEADER_BYTES + size) as mapped:
        mapped[:4] = num_readers.to_bytes(4, "little")
        for tensor, place in zip(tensors, placed, strict=True):
            start = HEADER_BYTES + place.offset
            mapped[start : start + size_of(tensor)] = _bytes_of(tensor)


def _placed(tensors: Sequence[SharedTensor]) -> tuple[list[PlacedTensor], int]:
    offset, placed = 0, []
    for tensor in tensors:
        placed.append(PlacedTensor(tensor.name, tensor.dtype, tensor.shape, offset))
        offset += -(-size_of(tensor) // ALIGNMENT) * ALIGNMENT
    return placed, max(offset, ALIGNMENT)


def _bytes_of(tensor: SharedTensor) -> memoryview:
    """The bytes of the tensor, mapped."""
    size = size_of(tensor)
    if size == 0:
        return memoryview(b"")
    try:
        return np.memmap(tensor.file, np.uint8, "r", tensor.offset, (size,)).data
    except OSError as bad:
        raise WeightsError(f"{tensor.file}: {bad.strerror}; is there a newer version already?") from None


def flat(tensors: Sequence[SharedTensor]) -> np.ndarray:
    """The tensors' bytes one after another, without gaps, as u8 [bytes]."""
    return np.concatenate([np.frombuffer(_bytes_of(tensor), np.uint8) for tensor in tensors])


def sweep() -> None:
    """Remove the files of processes that were killed before they could do it."""
    for path in SHM.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:  # in use, of another user, or just removed
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(file.fileno()).st_size:  # else its owner is about to lock it
                path.unlink()

"""One tensor in a file of its own, which is a safetensors file too, named by what is in it.

    0          8                              64 k
    +----------+------------------------------+-----------------
    | N, u64   | N bytes: JSON, then spaces   | the tensor's bytes
    +----------+------------------------------+-----------------

The header follows from name, dtype and shape, and the file's name from those and the hash: whoever wants a tensor knows both.
"""

import errno
import fcntl
import functools
import json
import os
import signal
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.mapped_file import map_file
from slimebus.weights.safetensors_file import CODES
from slimebus.weights.tensors import hash_bytes, tensor_bytes

ALIGNMENT = 64
SUFFIX = ".safetensors"
MAX_WRITE_BYTES = 1 << 30
"""Linux writes at most 2 GiB at a time."""


class TensorForm(NamedTuple):
    """What a tensor is, and the hash of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    hash: str

    @property
    def size(self) -> int:
        """Of the tensor's bytes."""
        return tensor_bytes(self.name, self.dtype, self.shape)

    @property
    def header(self) -> bytes:
        """All bytes of the file before the tensor's."""
        return _header(self.name, self.dtype, self.shape)[0]

    @property
    def file_name(self) -> str:
        """One for each content: equal bytes of two tensors are two files."""
        return f"{self.hash}-{_header(self.name, self.dtype, self.shape)[1]}{SUFFIX}"


def spare_name(file_name: str) -> str:
    """The same for all contents of a tensor's name, dtype and shape."""
    return file_name.partition("-")[2]


@functools.lru_cache(maxsize=1 << 16)
def _header(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, str]:
    """A header and what it is called; asked for several times a version, and the same in all of them."""
    described = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [0, tensor_bytes(name, dtype, shape)]}
    text = json.dumps({"__metadata__": {"format": "pt"}, name: described}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, hash_bytes(header)[:16]


def create(descriptor: int, form: TensorForm, content: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Make an empty open file one of this form; the place of the tensor's bytes, to be changed. content: what they are at first.

    Raises OSError, with ENOSPC where there is no memory: written to later, what is not there would end the process. Content is written
    and not copied through a mapping: pages that the kernel fills it need not clear before.
    """
    header = form.header
    size = len(header) + form.size
    if content is None:
        os.posix_fallocate(descriptor, 0, size)
    else:
        _write(descriptor, len(header), content.data)
    _write(descriptor, 0, memoryview(header))
    return map_file(descriptor, size, "write", at_once=True)[len(header) :]


def reuse(descriptor: int, form: TensorForm) -> NDArray[np.uint8]:
    """As `create` in a file that was made for another content of this form: its pages are there already.

    Raises OSError when anybody could see it change: has it linked, open or mapped. The kernel knows, for it gives a lease for writing
    on no other file (and on no file system without leases).
    """
    header = form.header
    size = len(header) + form.size
    found = os.fstat(descriptor)
    if (found.st_nlink, found.st_size) != (1, size):
        raise OSError(errno.EBUSY, "it is linked elsewhere, or was cut off")
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; the usual one, if another opens it now, ends a process
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    _write(descriptor, 0, memoryview(header))
    return map_file(descriptor, size, "write", at_once=True)[len(header) :]


def _write(descriptor: int, offset: int, content: memoryview) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done : done + MAX_WRITE_BYTES], offset + done)


def read(descriptor: int, form: TensorForm) -> NDArray[np.uint8] | None:
    """The verified bytes of the tensor in an open file; None when they, or the file's size or header, are not what they should be."""
    header = form.header
    if os.fstat(descriptor).st_size != len(header) + form.size or os.pread(descriptor, len(header), 0) != header:
        return None
    found = map_file(descriptor, len(header) + form.size, "read", at_once=True)[len(header) :]
    return found if hash_bytes(found) == form.hash else None

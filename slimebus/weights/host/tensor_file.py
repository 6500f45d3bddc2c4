"""One tensor in a file of its own, which is a safetensors file too, named by what is in it.

    0          8                              64 k
    +----------+------------------------------+-----------------
    | N, u64   | N bytes: JSON, then spaces   | the tensor's bytes
    +----------+------------------------------+-----------------

The safetensors package aligns tensors to 8 bytes and would copy them; here they are mapped, so the header is made by hand.
It follows from name, dtype and shape, and the file's name from those and the hash: whoever wants a tensor knows both.
"""

import errno
import fcntl
import functools
import json
import os
import signal

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.host.mapped_file import map_file
from slimebus.weights.tensors import SAFETENSORS_CODES, TensorForm, checksum, hash_bytes, tensor_bytes

ALIGNMENT = 64
SUFFIX = ".safetensors"


def header_of(form: TensorForm) -> bytes:
    """All bytes of the file before the tensor's."""
    return _header(form.name, form.dtype, form.shape)[0]


def file_name(form: TensorForm) -> str:
    """One for each content: equal bytes of two tensors are two files."""
    return f"{form.hash}-{_header(form.name, form.dtype, form.shape)[1]}{SUFFIX}"


def reusable_name(file_name: str) -> str:
    """The same for all contents of a tensor's name, dtype and shape."""
    return file_name.partition("-")[2]


@functools.lru_cache(maxsize=1 << 16)
def _header(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[bytes, str]:
    """A header and what it is called; asked for several times a version, and the same in all of them."""
    described = {"dtype": SAFETENSORS_CODES[dtype], "shape": list(shape), "data_offsets": [0, tensor_bytes(name, dtype, shape)]}
    text = json.dumps({"__metadata__": {"format": "pt"}, name: described}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, checksum(header)[:16]


def create(descriptor: int, form: TensorForm) -> NDArray[np.uint8]:
    """Make an empty open file one of this form; the place of the tensor's bytes, to be changed.

    Raises OSError, with ENOSPC where there is no memory: written to later, what is not there would end the process.
    """
    os.posix_fallocate(descriptor, 0, len(header_of(form)) + form.size)
    return _writeable(descriptor, form)


def reuse(descriptor: int, form: TensorForm) -> NDArray[np.uint8]:
    """As `create` in a file that was made for another content of this form: its pages are there already.

    Raises OSError when anybody could see it change: has it linked, open or mapped. The kernel knows, for it gives a lease for writing
    on no other file (and on no file system without leases).
    """
    found = os.fstat(descriptor)
    if (found.st_nlink, found.st_size) != (1, len(header_of(form)) + form.size):
        raise OSError(errno.EBUSY, "it is linked elsewhere, or was cut off")
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)  # ignored by default; the usual one, if another opens it now, ends a process
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return _writeable(descriptor, form)


def _writeable(descriptor: int, form: TensorForm) -> NDArray[np.uint8]:
    header = header_of(form)
    os.pwrite(descriptor, header, 0)
    return map_file(descriptor, len(header) + form.size, "write", at_once=True)[len(header) :]


def read(descriptor: int, form: TensorForm) -> NDArray[np.uint8] | None:
    """The verified bytes of the tensor in an open file; None when they, or the file's size or header, are not what they should be."""
    header = header_of(form)
    if os.fstat(descriptor).st_size != len(header) + form.size or os.pread(descriptor, len(header), 0) != header:
        return None
    found = map_file(descriptor, len(header) + form.size, "read", at_once=True)[len(header) :]
    return found if hash_bytes(found) == form.hash else None

"""One tensor in a file of its own, which is a safetensors file too, named by what is in it.

The safetensors package aligns tensors to 8 bytes and would copy them; here they are mapped, from a multiple of 64 bytes on.
It follows from name, dtype and shape, and the file's name from those and the hash: a taker of a tensor knows both. No descriptor of
a mapped file stays open: a version may be more files than a process may have open.
"""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import signal
import weakref
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slimebus.bus.errors import FatalWeightsError
from slimebus.weights.tensors import TensorForm, checksum, hash_bytes, safetensors_header

Access = Literal["read", "write", "private"]
"""private: for those who insist on memory that can be written to (torch); the file does not see it."""

_PROTECTION = {"read": mmap.PROT_READ, "write": mmap.PROT_READ | mmap.PROT_WRITE, "private": mmap.PROT_READ | mmap.PROT_WRITE}
_FAILED = ctypes.c_void_p(-1).value


def map_file(descriptor: int, size: int, access: Access, *, at_once: bool = False) -> NDArray[np.uint8]:
    """The first `size` bytes of an open file, which may be closed then. Raises WeightsError where the system maps no more.

    at_once: all of it will be read, so its pages are mapped together: that takes a third of the time of one after another.
    """
    if size == 0:
        return np.empty(0, np.uint8)
    libc, flags = _libc(), mmap.MAP_PRIVATE if access == "private" else mmap.MAP_SHARED
    flags |= getattr(mmap, "MAP_POPULATE", 0) if at_once else 0
    # Private pages that may be written to would each be copied when they are mapped at once.
    first = mmap.PROT_READ if access == "private" else _PROTECTION[access]
    address = libc.mmap(None, size, first, flags, descriptor, 0)
    if address == _FAILED or libc.mprotect(address, size, _PROTECTION[access]):
        why = os.strerror(ctypes.get_errno())
        raise FatalWeightsError(f"a file of {size} bytes cannot be mapped: {why}; is vm.max_map_count too low?")
    owner = (ctypes.c_uint8 * size).from_address(address)
    # Not at the interpreter's end, when threads may still read: the kernel unmaps then.
    weakref.finalize(owner, libc.munmap, address, size).atexit = False
    found: NDArray[np.uint8] = np.frombuffer(memoryview(owner), np.uint8)
    found.flags.writeable = access != "read"
    return found


@functools.cache
def _libc() -> Any:
    """Python's own mmap keeps a descriptor open for each mapping."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


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
    header = safetensors_header([(name, dtype, shape)], ALIGNMENT)
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

"""Files mapped into memory as bytes. No descriptor stays open: a version may be more files than a process may have open."""

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from slimebus.bus.errors import FatalWeightsError

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

"""One gloo device for all process groups of a rank.

Every gloo device has a thread that wakes up a hundred times a second, and torch makes a device for each process group. Megatron makes
some twenty groups: a rank that only waits would use 2.5% of a core (measured); with one device it is 0.2%.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from torch.distributed import distributed_c10d


@contextlib.contextmanager
def shared_gloo_device() -> Iterator[None]:
    """Process groups made inside use one device; as always GLOO_SOCKET_IFNAME names its network interface."""
    c10d: Any = distributed_c10d
    if not c10d.is_gloo_available():
        yield
        return
    own: Any = c10d.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [own.create_device(interface=name) for name in interfaces] or [own.create_default_device()]

    class OnSharedDevices(own):
        def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
            options = own._Options()
            options._devices, options._timeout = devices, timeout
            super().__init__(store, rank, size, options)

    c10d.ProcessGroupGloo = OnSharedDevices
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = own

"""Rank 0 of a group through which an SGLang on another host gets tensors; its tensor-parallel ranks are 1, 2, ...

The group is gloo over TCP: the engine connects to a port of this host to find us, and both sides then connect to each other. torch is
imported here and nowhere else in a worker.
"""

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np

from rollout.engines.sglang.calls import WeightCalls
from slimebus.bus.errors import SlimebusError, WeightsError
from slimebus.process.launch import free_port
from slimebus.weights.host.shared_folder import SharedTensor
from slimebus.weights.tensors import DTYPE_BYTES

JOIN_TIMEOUT_S = 30.0
BUCKET_BYTES = 512 << 20
SEND_TIMEOUT_S = 120.0
"""Most time one bucket may take."""

LEAVE_TIMEOUT_S = 5.0

_numbers = itertools.count()


class BroadcastGroup:
    """One group with one engine. After any failure it cannot be used any more: close it, and make another."""

    def __init__(self, calls: WeightCalls, address: str, num_ranks: int) -> None:
        """address: this host's, as the engine reaches it; num_ranks: of the engine."""
        self.calls, self.address, self.num_ranks = calls, address, num_ranks
        self.name = f"slimebus-{socket.gethostname()[:24]}-{os.getpid()}-{next(_numbers)}"
        self._group: Any = None

    async def open(self) -> None:
        """Meet the engine. Raises WeightsError when it does not come within JOIN_TIMEOUT_S."""
        port = free_port()
        ours = asyncio.ensure_future(asyncio.to_thread(self._meet, port))
        theirs = asyncio.ensure_future(self.calls.join_group(self.name, self.address, port, 1 + self.num_ranks))
        self._group = await self._both(ours, theirs, f"no engine came to {self.address}:{port} within {JOIN_TIMEOUT_S:.0f} s")

    def _meet(self, port: int) -> Any:
        import torch.distributed as dist

        timeout = timedelta(seconds=JOIN_TIMEOUT_S)
        store = dist.TCPStore(self.address, port, 1 + self.num_ranks, True, timeout)
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.address)]
        options._timeout = timedelta(seconds=SEND_TIMEOUT_S)
        # The prefixes under which torch.distributed's own helper, which SGLang calls, lets the ranks of a group meet.
        prefixed = dist.PrefixStore("cpu/", dist.PrefixStore(f"{self.name}/", dist.PrefixStore(self.name, store)))
        return gloo(prefixed, 0, 1 + self.num_ranks, options)

    async def send(self, tensors: Sequence[SharedTensor], tag: str | None) -> None:
        """Give the engine one bucket; it has loaded it on return. Raises WeightsError, Unreachable."""
        largest_first = sorted(tensors, key=lambda tensor: -DTYPE_BYTES[tensor.dtype])  # so that none is misaligned
        ours = asyncio.ensure_future(asyncio.to_thread(self._broadcast, largest_first))
        theirs = asyncio.ensure_future(self.calls.receive(largest_first, self.name, tag))
        await self._both(ours, theirs, f"the engine did not take its weights within {SEND_TIMEOUT_S:.0f} s")

    def _broadcast(self, tensors: Sequence[SharedTensor]) -> None:
        import torch
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([torch.from_numpy(np.concatenate([tensor.read() for tensor in tensors]))], options).wait()

    async def _both(self, ours: "asyncio.Future[Any]", theirs: "asyncio.Future[None]", why: str) -> Any:
        """What ours gives, once both are done. What the engine says of a failure is told rather than what torch says."""
        try:
            await asyncio.wait({ours, theirs}, return_when=asyncio.FIRST_EXCEPTION)
            if theirs.done():
                theirs.result()
            found = await ours
            await theirs
            return found
        except RuntimeError as bad:  # torch.distributed's errors are this or derived from it
            raise WeightsError(f"{self.calls.client.url}: {why}: {str(bad).splitlines()[0]}") from None
        finally:
            theirs.cancel()
            ours.add_done_callback(lambda done: done.cancelled() or done.exception())  # its thread ends at its own deadline

    async def close(self) -> None:
        """Leave; the engine is told to leave too, if it can be reached."""
        if self._group is not None:
            self._group = None
            with contextlib.suppress(SlimebusError, TimeoutError):
                await asyncio.wait_for(self.calls.leave_group(self.name), LEAVE_TIMEOUT_S)


def buckets(tensors: Iterable[SharedTensor], limit_bytes: int = BUCKET_BYTES) -> Iterator[list[SharedTensor]]:
    """The tensors in turn, in lists of at most limit_bytes, or of one tensor that is larger."""
    bucket: list[SharedTensor] = []
    room = limit_bytes
    for tensor in tensors:
        if bucket and tensor.size_bytes > room:
            yield bucket
            bucket, room = [], limit_bytes
        bucket.append(tensor)
        room -= tensor.size_bytes
    if bucket:
        yield bucket

"""The weights at one moment, for the weight store: all of them on the host, or what changed since the version before."""

from collections.abc import Iterable
from typing import Protocol

import torch

from slimebus.weights import device_codec
from slimebus.weights.store import VersionStore
from slimebus.weights.tensors import TensorChanges, TensorLike

IN_FLIGHT_BYTES = 1 << 29
"""Of copies to the host that are under way: what they read holds GPU memory until they have ended."""

Taken = dict[str, TensorLike | TensorChanges]


class Snapshot(Protocol):
    """What a publish of a store gets. The step waits for `take` and for nothing else."""

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], store: VersionStore) -> Taken:
        """These tensors in bfloat16; updates of the weights do not touch what is returned, the next `take` may."""


def snapshot_of(diff: str) -> Snapshot:
    """The snapshot for `weights.weights_diff`: host or device."""
    return DeviceSnapshot() if diff == "device" else HostSnapshot()


class HostSnapshot:
    """Every tensor, copied into host memory that is used again: pinned and filled on a stream of its own where they are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_flight = 0

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], store: VersionStore) -> Taken:
        """See Snapshot; always whole tensors."""
        before, self._buffers = self._buffers, {}
        for name, tensor in tensors:
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                buffer = torch.empty(tensor.shape, dtype=torch.bfloat16, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            self._copy(tensor, buffer)
        self._wait()
        return {name: _bits(buffer) for name, buffer in self._buffers.items()}

    def _copy(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        if not tensor.is_cuda:
            buffer.copy_(tensor)
            return
        rounded = tensor.to(torch.bfloat16).contiguous()  # on the GPU: half of the bytes cross
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))  # which has just gathered this tensor, and goes on with the next
        with torch.cuda.stream(stream):
            buffer.copy_(rounded, non_blocking=True)
        rounded.record_stream(stream)
        self._in_flight += rounded.nbytes
        if self._in_flight > IN_FLIGHT_BYTES:
            self._wait()

    def _wait(self) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        self._in_flight = 0


class DeviceSnapshot:
    """What changed, found where the weights lie. The version before stays there, in bfloat16, for that: 2 bytes a value.

    A tensor comes whole when it is new, when its shape changed, when its changes are no smaller, and always when the store does
    not hold the version that the last `take` was for.
    """

    def __init__(self) -> None:
        self._base: dict[str, torch.Tensor] = {}
        self._version: int | None = None

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, torch.Tensor]], store: VersionStore) -> Taken:
        """See Snapshot."""
        newest = store.newest
        if newest is None or newest.version != self._version:
            self._base = {}
        self._version = None  # while the base is of two versions
        before, self._base = self._base, {}
        taken: Taken = {}
        for name, tensor in tensors:
            rounded = tensor.to(torch.bfloat16).contiguous()
            base = before.pop(name, None)
            if newest is None or base is None or (base.shape, base.device) != (rounded.shape, rounded.device):
                self._base[name], taken[name] = rounded.clone(), _whole(rounded)
            else:
                self._base[name], taken[name] = base, _step(base, rounded, newest.version)
        self._version = store.next_version
        return taken


def _step(base: torch.Tensor, rounded: torch.Tensor, version: int) -> TensorLike | TensorChanges:
    units = device_codec.scan(base, rounded, update=True)
    if sum(len(stream) for changes in units for stream in changes) >= rounded.nbytes:
        return _whole(rounded)
    return TensorChanges("bfloat16", tuple(rounded.shape), version, units)


def _whole(rounded: torch.Tensor) -> TensorLike:
    return _bits(rounded.to("cpu", copy=True))


def _bits(host: torch.Tensor) -> TensorLike:
    return host.view(torch.int16).numpy().view("uint16")

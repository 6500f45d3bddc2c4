"""The weights at one moment, on the host, for the weight store."""

from collections.abc import Iterable

import torch

from slimebus.weights.tensors import TensorLike, canonical

IN_FLIGHT_BYTES = 1 << 29
"""Of copies to the host that are under way: what they read holds GPU memory until they have ended."""

IN_FLOAT32 = "e_score_correction_bias"
"""The router's correction bias moves in steps that bfloat16 rounds away, and chooses experts; engines hold it in float32 too."""

Taken = dict[str, TensorLike]


class HostSnapshot:
    """Every tensor, copied into host memory that is used again: pinned and filled on a stream of its own where they are on a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._in_flight = 0

    @torch.no_grad()
    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Taken:
        """These tensors in bfloat16, router biases in float32. Updates of weights do not touch what is returned, the next `take` may."""
        before, self._buffers = self._buffers, {}
        for name, tensor in tensors:
            buffer = before.get(name)
            if buffer is None or buffer.shape != tensor.shape:
                dtype = torch.float32 if name.endswith(IN_FLOAT32) else torch.bfloat16
                buffer = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
            self._buffers[name] = buffer
            self._copy(tensor, buffer)
        self._wait()
        return {name: _bits(buffer) for name, buffer in self._buffers.items()}

    def _copy(self, tensor: torch.Tensor, buffer: torch.Tensor) -> None:
        if not tensor.is_cuda:
            canonical(buffer.copy_(tensor))
            return
        rounded = canonical(tensor.to(buffer.dtype, copy=True).contiguous())  # on the GPU: half of the bytes cross
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


def _bits(host: torch.Tensor) -> TensorLike:
    return host.view(torch.int16).numpy().view("uint16") if host.dtype == torch.bfloat16 else host.numpy()

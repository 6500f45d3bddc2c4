"""From the trainer's torch tensors to the bytes that are published."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.tensors import Tensor

if TYPE_CHECKING:
    import torch


def to_bf16(parameter: "torch.Tensor") -> NDArray[np.uint16]:
    """The bfloat16 bit patterns of a float32 tensor, rounded to nearest, ties to even; on the host, in its shape."""
    import torch

    rounded = parameter.detach().to(torch.bfloat16).contiguous().cpu()
    return rounded.view(torch.int16).numpy().view(np.uint16)


def rounded(tensor: Tensor) -> Tensor:
    """A float32 tensor as bfloat16, rounded to nearest, ties to even, as the trainer publishes it; others as they are. No torch."""
    if tensor.dtype != "float32":
        return tensor
    bits = tensor.buffer.view(np.uint32)
    nearest = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    nearest[is_nan] = ((bits[is_nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)  # rounding must not make it an infinity
    return Tensor("bfloat16", tensor.shape, nearest.view(np.uint8))


def to_tensor(parameter: "torch.Tensor") -> Tensor:
    """Any torch tensor as it is, its bytes on the host (shared where it lies there already)."""
    import torch

    host = parameter.detach().contiguous().cpu()
    flat: Any = host.reshape(-1).view(torch.uint8).numpy()
    return Tensor(str(host.dtype).removeprefix("torch."), tuple(host.shape), flat)


def from_tensor(tensor: Tensor) -> "torch.Tensor":
    """A torch tensor over the same memory where that is writeable; do not write to it."""
    import torch

    dtype: Any = getattr(torch, tensor.dtype)
    if not len(tensor.buffer):
        return torch.empty(tensor.shape, dtype=dtype)
    writeable = tensor.buffer if tensor.buffer.flags.writeable else tensor.buffer.copy()  # torch refuses memory that is read-only
    return torch.from_numpy(writeable).view(dtype).reshape(tensor.shape)

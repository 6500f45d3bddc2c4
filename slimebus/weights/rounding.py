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

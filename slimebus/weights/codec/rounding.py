"""From the trainer's torch tensors to the bytes that are published."""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from slimebus.weights.tensors import Tensor

if TYPE_CHECKING:
    import torch

NAN = 0x7FC0


def host_bytes(tensor: "torch.Tensor") -> NDArray[np.uint8]:
    """All bytes of a tensor, on the host, [size]; over its memory where that can be."""
    import torch

    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def canonical(rounded: "torch.Tensor") -> "torch.Tensor":
    """The same bfloat16 tensor, every NaN of it now 0x7FC0, in place: what rounding makes of a NaN depends on device and layout."""
    if rounded.is_cuda or bool(rounded.sum().isnan()):  # on a CPU a sum is cheaper than a mask; on a GPU it would be waited for
        rounded.masked_fill_(rounded.isnan(), float("nan"))
    return rounded


def rounded(tensor: Tensor) -> Tensor:
    """A float32 tensor as bfloat16, rounded to nearest, ties to even, as the trainer publishes it; others as they are. No torch."""
    if tensor.dtype != "float32":
        return tensor
    bits = tensor.buffer.view(np.uint32)
    nearest = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    nearest[is_nan] = NAN
    return Tensor("bfloat16", tensor.shape, nearest.view(np.uint8))

"""RMSNorm as a module for megatron-core specs, and its function with a short backward.

Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4: y = x / rms(x) * w. Computed in fp32.
"""

from typing import Any

import torch


class RMSNormFunction(torch.autograd.Function):
    """Keeps x and 1 / rms(x); torch's own on CPU is a chain of seven ops each with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        # n = x / rms: dw = sum g n; dx = (g w - n mean(g w n)) / rms
        normal = x.float() * scale
        grad = grads[0].float()
        product = grad * normal
        dims = tuple(range(x.dim() - 1))
        grad_weight = product.sum(dims)
        mean = torch.mv(product.reshape(-1, x.shape[-1]), weight.float()).view(scale.shape).div_(x.shape[-1])
        grad_x = (grad * weight).addcmul_(normal, mean, value=-1).mul_(scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


rms_norm = RMSNormFunction.apply
"""(x, weight, eps) to x / rms(x) * weight over the last dimension; any leading shape, in x's dtype."""


class RMSNorm(torch.nn.Module):
    """Allows sequence parallelism, which megatron's own norm without Transformer Engine refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # its gradient is summed over TP

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)

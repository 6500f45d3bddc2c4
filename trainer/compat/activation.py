"""The MLP's activation as a module for megatron-core specs: gated or plain, SwiGLU with a short backward."""

from typing import Any

import torch
import torch.nn.functional as F


class SwiGLU(torch.autograd.Function):
    """silu(a) * b for x = (a, b) over the last dimension; keeps only x, and writes each half of the gradient in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        a, b = x.chunk(2, -1)
        return F.silu(a).mul_(b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        a, b = x.chunk(2, -1)
        grad = torch.empty_like(x)
        grad_a, grad_b = grad.chunk(2, -1)
        torch.mul(grads[0], F.silu(a), out=grad_b)
        torch.ops.aten.silu_backward.grad_input(grads[0] * b, a, grad_input=grad_a)
        return grad


class Activation(torch.nn.Module):
    """In place of Transformer Engine's activation modules; has no weights."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.function, self.is_gated = config.activation_func, config.gated_linear_unit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_gated:
            return self.function(x)
        if self.function is F.silu:
            return SwiGLU.apply(x)
        a, b = x.chunk(2, -1)
        return self.function(a) * b

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

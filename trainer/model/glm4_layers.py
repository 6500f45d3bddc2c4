"""GLM-4's norms after attention and after the MLP, before each is added to the residual (arXiv:2406.12793).

    x + norm(attention(norm(x)))   and then   x + norm(mlp(norm(x)))

Megatron's layers have no place for them, so each belongs to the linear layer before it.
"""

from typing import Any

import torch


def with_post_norm(linear: Any, norm: Any) -> Any:
    """`linear`, a row-parallel layer class, followed by a norm of its output: its parameter `post_norm.weight`."""

    class NormedLinear(linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            out, bias = super().forward(x, *args, **options)
            return self.post_norm(out), bias

    return NormedLinear


def add_post_norms(block: Any) -> None:
    """Change a decoder's spec, in place: every layer gets both norms. The layers of a stage may share one spec."""
    for layer in {id(spec): spec.submodules for spec in block.layer_specs}.values():
        attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
        attention.linear_proj = with_post_norm(attention.linear_proj, block.layer_norm)
        mlp.linear_fc2 = with_post_norm(mlp.linear_fc2, block.layer_norm)

"""Transformer Engine's module and parameter names on plain torch.

Our weight map and Megatron's checkpoints are written for the Transformer Engine layer specs; `install()` makes those specs build these
modules, so one map and one checkpoint layout serve machines with and without Transformer Engine. RMSNorm only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.utils import divide
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from trainer.compat.attention import PackedAttention, rotate_packed


class RMSNormFunction(torch.autograd.Function):
    """y = x / rms(x) * w in fp32 (Zhang and Sennrich, 2019, eq. 4). Keeps x and 1 / rms(x);
    torch's own on CPU is a chain of seven ops each with its own backward.
    """

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


class WithoutTeOptions:
    """Takes away the options that only Transformer Engine's modules have."""

    def __init__(self, *args: Any, parallel_mode: Any = None, name: Any = None, symmetric_ar_type: Any = None, **options: Any) -> None:
        super().__init__(*args, **options)


class ColumnLinear(WithoutTeOptions, ColumnParallelLinear):
    """TEColumnParallelLinear."""


class RowLinear(WithoutTeOptions, RowParallelLinear):
    """TERowParallelLinear."""


class LayerNormColumn(ColumnLinear):
    """TELayerNormColumnParallelLinear: the norm lives in the linear layer, as `layer_norm_weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.norm_eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        return super().forward(rms_norm(x, self.layer_norm_weight, self.norm_eps), *args, **options)


class Linear(torch.nn.Module):
    """TELinear with parallel_mode 'duplicated' (the down projections of latent attention)."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **unused: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x, self.weight), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, None, sharded_offsets)


class Grouped(torch.nn.Module):
    """TEColumnParallelGroupedLinear: weight0 .. weightN-1, one product for each local expert."""

    axis = 0

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, init_method: Any, pg_collection: Any = None, **unused: Any
    ) -> None:
        super().__init__()
        self.num_gemms, self.groups = num_gemms, pg_collection
        shape = [output_size, input_size]
        shape[self.axis] = divide(shape[self.axis], pg_collection.expt_tp.size())
        for index in range(num_gemms):
            weight: Any = torch.nn.Parameter(torch.empty(*shape, dtype=config.params_dtype))
            init_method(weight)
            weight.allreduce = config.expert_model_parallel_size <= 1
            # true at expert TP 1 as well: the gradient norm counts what is marked
            weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, self.axis, 1
            self.register_parameter(f"weight{index}", weight)

    def forward(self, x: torch.Tensor, m_splits: Any) -> tuple[torch.Tensor, None]:
        parts = x.split(torch.as_tensor(m_splits).tolist())
        return torch.cat([F.linear(rows, getattr(self, f"weight{i}")) for i, rows in enumerate(parts)]), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        experts, out = self.groups.ep, {}
        for i in range(self.num_gemms):
            offset = (len(sharded_offsets), experts.rank() * self.num_gemms + i, experts.size() * self.num_gemms)
            one = make_sharded_tensors_for_checkpoint(
                {f"{i}.weight": getattr(self, f"weight{i}")},
                "",
                {f"{i}.weight": self.axis},
                (*sharded_offsets, offset),
                tp_group=self.groups.expt_tp,
                dp_cp_group=self.groups.expt_dp,
            )
            replace_prefix_for_sharding(one, f"{i}.", prefix)
            out[f"{prefix}weight{i}"] = tensor = one[f"{i}.weight"]
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
        return out


class GroupedRow(Grouped):
    """TERowParallelGroupedLinear."""

    axis = 1


def constant_method(made: Any) -> Any:
    """A method of megatron's BackendSpecProvider that gives this, for any arguments."""
    return staticmethod(lambda *args, **options: made)


class Provider:
    """In place of TESpecProvider: which class builds which part of a layer."""

    linear = constant_method(Linear)
    column_parallel_linear = constant_method(ColumnLinear)
    row_parallel_linear = constant_method(RowLinear)
    fuse_layernorm_and_linear = constant_method(True)
    column_parallel_layer_norm_linear = constant_method(LayerNormColumn)
    layer_norm = constant_method(RMSNorm)
    core_attention = constant_method(PackedAttention)
    activation_func = constant_method(None)

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, moe_use_legacy_grouped_gemm: bool) -> Any:
        if moe_use_grouped_gemm:
            return TEGroupedMLP, MLPSubmodules(linear_fc1=Grouped, linear_fc2=GroupedRow)
        return SequentialMLP, MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)


def install() -> bool:
    """Make megatron's Transformer Engine specs build the modules of this file, unless megatron found Transformer Engine; whether it did.

    Call before a spec is built.
    """
    if gpt_layer_specs.HAVE_TE:
        return False
    gpt_layer_specs.TESpecProvider = Provider
    gpt_layer_specs.TENorm = RMSNorm
    # None without Transformer Engine, and then isinstance() fails
    multi_latent_attention.TELinear, multi_latent_attention.TEColumnParallelLinear = Linear, ColumnLinear
    rope_utils.fused_apply_rotary_pos_emb_thd = rotate_packed
    return True

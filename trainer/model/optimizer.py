"""AdamW on Megatron's distributed optimizer, and the learning rate of each step."""

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from slimebus.config import RunConfig, schema
from trainer.arguments.megatron_options import check_architecture, make_config, split_megatron_options
from trainer.compat import cpu_compat
from trainer.model import parallel
from trainer.model.gpt import Model

COPIED = ("lr", "min_lr", "adam_beta1", "adam_beta2", "clip_grad")


def build_optimizer(config: RunConfig, model: Model) -> Any:
    """Megatron's distributed optimizer over the model's gradient buffers, also at one rank: one checkpoint layout for all."""
    dtype = parallel.params_dtype(config.trainer)
    chosen = {
        **{name: getattr(config.optimizer, name) for name in COPIED},
        "optimizer": "adam",
        "weight_decay": 0.0,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": True,
    }
    check_architecture(model.config, config.megatron)
    options = split_megatron_options(config.megatron)["OptimizerConfig"]
    optimizer = get_megatron_optimizer(make_config(OptimizerConfig, chosen | options), [model.module], use_gloo_process_groups=False)
    for group in optimizer.param_groups:  # Megatron's scheduler, which is not used, would leave norms and biases undecayed
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]
    model.config.grad_scale_func = optimizer.scale_loss
    if model.module.ddp_config.overlap_grad_reduce:  # else each row's gradients would be reduced, and those of the others left out
        model.config.no_sync_func = model.module.no_sync
    return optimizer


def gather_weights(model: Model) -> None:
    """Make the weights whole on every rank. With overlap_param_gather a rank has its own shard of them after a step, and the others' only
    when a forward pass in training asks for them; who publishes, saves or computes logprobs reads them without.
    """
    if model.module.ddp_config.overlap_param_gather:
        model.module.start_param_sync(force_sync=True)


def learning_rate(settings: schema.OptimizerConfig, step: int, *, num_updates: int) -> float:
    """Learning rate of optimizer step `step`, the first being 0: linear warm-up, then decay from lr to min_lr at lr_decay_iters, or at the
    last of the run's num_updates steps.
    """
    if step < settings.lr_warmup_iters:
        return settings.lr * (step + 1) / settings.lr_warmup_iters
    if settings.lr_decay_style == "constant":
        return settings.lr
    span = max(1, (settings.lr_decay_iters or num_updates) - settings.lr_warmup_iters)
    done = min(1.0, (step - settings.lr_warmup_iters) / span)
    left = 1.0 - done if settings.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Give every parameter group this learning rate, times its own multiplier if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_mult", 1.0)


class GradientCosine:
    """The cosine of each gradient with that of the optimizer step before, over all ranks and before clipping; one that stays high is a sign
    of stale samples (Xu et al., "GAC", arXiv 2603.01501)."""

    def __init__(self) -> None:
        self._before: list[list[torch.Tensor]] = []
        self._norm_before = 0.0
        self.metrics: dict[str, float] = {}
        """`grad_cosine` of the last step that was made; empty at the first."""

    @torch.no_grad()
    def measure(self, optimizer: Any, norm: float) -> None:
        """Compare the gradients, ready for the step, with `norm` over all ranks, and keep a copy."""
        chain, dot = getattr(optimizer, "chained_optimizers", [optimizer]), 0.0
        grads = [[grad.float() for grad in part.get_main_grads_for_grad_norm()] for part in chain]
        for part, now, before in zip(chain, grads, self._before, strict=False):  # nothing before the first
            products = [torch.zeros((), device=parallel.device()), *(torch.sum(a * b) for a, b in zip(now, before, strict=True))]
            total = torch.stack(products).sum()
            dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
            dot += float(total)
        size = norm * self._norm_before
        self.metrics = {"grad_cosine": dot / size} if size else {}
        self._before, self._norm_before = [[grad.clone() for grad in part] for part in grads], norm


def step_if_finite(optimizer: Any, loss: float, cosine: GradientCosine | None = None) -> tuple[bool, float]:
    """One step, or none when the loss or the gradient is not finite: weights and Adam's moments then stay as they are.

    Whether it was made, and the norm of the whole gradient before clipping; both the same on every rank, as `loss` must be.
    """
    has_overflow, norm = optimizer.prepare_grads(), float(optimizer.get_grad_norm() or 0.0)
    if has_overflow or not math.isfinite(norm) or not math.isfinite(loss):
        return False, norm
    if cosine is not None:
        cosine.measure(optimizer, norm)
    updated, _, _ = optimizer.step()
    return bool(updated), norm


def clear_gradients(model: Model, optimizer: Any) -> None:
    """Zero the gradient buffers before a step."""
    model.module.zero_grad_buffer()
    with cpu_compat.library_warnings_ignored():  # each time: the optimizer asks for the .grad of its shards, which are views
        optimizer.zero_grad()

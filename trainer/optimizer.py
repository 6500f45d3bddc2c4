"""AdamW on Megatron's distributed optimizer, and the learning rate of each step."""

import math
from typing import Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from slimebus.config import schema
from trainer import cuda_bridge
from trainer.megatron_fields import split_megatron_options
from trainer.model import DTYPES, Model


def build_optimizer(settings: schema.OptimizerConfig, model: Model) -> Any:
    """Megatron's distributed optimizer over the model's gradient buffers, also at one rank: one checkpoint layout for all."""
    options = split_megatron_options(model.settings.megatron)["OptimizerConfig"]
    chosen = {
        "optimizer": "adam",
        "lr": settings.lr,
        "min_lr": settings.min_lr,
        "adam_beta1": settings.adam_beta1,
        "adam_beta2": settings.adam_beta2,
        "adam_eps": settings.adam_eps,
        "weight_decay": settings.weight_decay,
        "clip_grad": settings.clip_grad,
        "bf16": model.settings.dtype == "bfloat16",
        "params_dtype": DTYPES[model.settings.dtype],
        "use_distributed_optimizer": True,
    }
    optimizer = get_megatron_optimizer(OptimizerConfig(**{**chosen, **options}), [model.module])
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def learning_rate(settings: schema.OptimizerConfig, step: int) -> float:
    """Learning rate of optimizer step `step`, the first being 0: linear warm-up, then decay from lr to min_lr."""
    if step < settings.lr_warmup_iters:
        return settings.lr * (step + 1) / settings.lr_warmup_iters
    if settings.lr_decay_style == "constant":
        return settings.lr
    span = max(1, settings.lr_decay_iters - settings.lr_warmup_iters)
    done = min(1.0, (step - settings.lr_warmup_iters) / span)
    left = 1.0 - done if settings.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return settings.min_lr + (settings.lr - settings.min_lr) * left


def set_learning_rate(optimizer: Any, value: float) -> None:
    """Give every parameter group this learning rate, times its own multiplier if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_mult", 1.0)


def clear_gradients(model: Model, optimizer: Any) -> None:
    """Zero the gradient buffers before a step."""
    model.module.zero_grad_buffer()
    with cuda_bridge.library_warnings_ignored():  # each time: the optimizer asks for the .grad of its shards, which are views
        optimizer.zero_grad()

"""What a policy is built from: the model and how it is spread, and sections of the run's config. Plain data: no torch, no megatron.

Anything Megatron has and the config does not name goes through `ModelSettings.megatron`, checked by trainer/megatron_fields.py.
"""

from typing import Any, Literal

import msgspec

from slimebus.config import Resolved
from slimebus.config.schema import AlgorithmConfig, OptimizerConfig
from slimebus.errors import ConfigError


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model is trained, in which precision, and how it is spread over the ranks."""

    hf_checkpoint: str
    """Hugging Face directory (config.json, safetensors, tokenizer files) the weights start from."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the parameters in the forward and backward pass; gradients and Adam's state are always fp32."""
    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Ranks that share the layers, in order."""
    context_parallel_size: int = 1
    """Ranks that share each sequence."""
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks too; needs tensor_model_parallel_size > 1."""
    seed: int = 1234
    """Seed of dropout and of anything else that draws in the trainer."""
    megatron: dict[str, Any] = {}
    """Fields of Megatron's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig, passed as they are."""

    def __post_init__(self) -> None:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigError("sequence_parallel: true with tensor_model_parallel_size 1; raise the size or turn it off")


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a Policy is built from."""

    model: ModelSettings
    """The model and its layout."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Adam and the schedule; a decay needs lr_decay_iters here."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages and loss."""
    max_tokens_per_gpu: int = 8192
    """Most tokens of one micro-batch on one rank (times context_parallel_size); a longer sample gets a micro-batch alone."""

    def __post_init__(self) -> None:
        o = self.optimizer
        if o.lr_decay_style != "constant" and not o.lr_decay_iters:
            raise ConfigError(f"lr_decay_style: {o.lr_decay_style} needs lr_decay_iters")
        if o.lr_decay_iters and o.lr_decay_iters < o.lr_warmup_iters:
            raise ConfigError(f"lr_decay_iters: {o.lr_decay_iters} is less than lr_warmup_iters {o.lr_warmup_iters}")
        if self.max_tokens_per_gpu < 1:
            raise ConfigError(f"max_tokens_per_gpu: got {self.max_tokens_per_gpu}, expected at least 1")


def settings_of(resolved: Resolved) -> TrainerSettings:
    """What the policy of a run is built from. Raises ConfigError when there is no model."""
    config = resolved.config
    t, steps = config.trainer, config.rollout.num_rollout * config.rollout.num_steps_per_rollout
    return TrainerSettings(
        model=ModelSettings(
            hf_checkpoint=str(resolved.model_dir),
            dtype=t.params_dtype,
            tensor_model_parallel_size=t.tensor_model_parallel_size,
            pipeline_model_parallel_size=t.pipeline_model_parallel_size,
            context_parallel_size=t.context_parallel_size,
            sequence_parallel=t.sequence_parallel,
            seed=config.seed + 1,  # megatron refuses 0
            megatron=config.megatron,
        ),
        optimizer=msgspec.structs.replace(config.optimizer, lr_decay_iters=config.optimizer.lr_decay_iters or steps),
        algorithm=config.algorithm,
        max_tokens_per_gpu=t.max_tokens_per_gpu,
    )


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether reference_logprobs are part of the loss."""
    return algorithm.loss_type == "policy_loss" and algorithm.kl_loss_coef != 0.0


def needs_old_pass(algorithm: AlgorithmConfig) -> bool:
    """Whether a forward pass before the update must recompute old_logprobs."""
    return algorithm.loss_type == "policy_loss" and not algorithm.use_rollout_logprobs


def trains_without_advantage(algorithm: AlgorithmConfig) -> bool:
    """Whether a sample of advantage 0 still has a gradient, and so cannot be left out."""
    return algorithm.loss_type == "sft_loss" or algorithm.kl_loss_coef != 0.0 or algorithm.entropy_coef != 0.0

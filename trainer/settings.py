"""What the trainer can be told, with the names that slime and Megatron use. Plain data: no torch, no megatron.

Sizes are in ranks, tokens or optimizer steps as each field says. Anything Megatron has and this file does not name goes through
`ModelSettings.megatron`, checked by trainer/megatron_fields.py.
"""

from typing import Any, Literal

import msgspec

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
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in the backward pass: whole layers (full), or core attention only (selective); None keeps them."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recompute: `uniform` chunks of recompute_num_layers, or only the first `block` of them."""
    recompute_num_layers: int | None = None
    """With full recompute: layers in a chunk (uniform) or layers recomputed (block)."""
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
        if self.recompute_granularity == "full" and (self.recompute_method is None or self.recompute_num_layers is None):
            raise ConfigError("recompute_granularity: full needs recompute_method and recompute_num_layers")


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """AdamW on Megatron's distributed optimizer, and its learning-rate schedule (in optimizer steps)."""

    lr: float = 1e-6
    """Highest learning rate, reached at the end of the warm-up."""
    min_lr: float = 0.0
    """Learning rate that the decay ends at."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up from lr / lr_warmup_iters."""
    lr_decay_iters: int | None = None
    """Step at which the decay reaches min_lr, warm-up included; needed by `linear` and `cosine`."""
    lr_decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the decay after the warm-up."""
    adam_beta1: float = 0.9
    """Decay of the mean of gradients."""
    adam_beta2: float = 0.98
    """Decay of the mean of squared gradients."""
    adam_eps: float = 1e-8
    """Added to the denominator."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms and biases are exempt, as in Megatron."""
    clip_grad: float = 1.0
    """Largest L2 norm of the whole gradient; 0 does not clip."""

    def __post_init__(self) -> None:
        if self.lr_decay_style != "constant" and self.lr_decay_iters is None:
            raise ConfigError(f"lr_decay_style: {self.lr_decay_style} needs lr_decay_iters")
        if self.lr_decay_iters is not None and self.lr_decay_iters < self.lr_warmup_iters:
            raise ConfigError(f"lr_decay_iters: {self.lr_decay_iters} is less than lr_warmup_iters {self.lr_warmup_iters}")


class AlgorithmSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How rewards become advantages, and advantages a loss (docs/algorithms.md)."""

    loss_type: Literal["policy_loss", "sft_loss"] = "policy_loss"
    """`policy_loss` is reinforcement learning; `sft_loss` is the negative log-probability of the trained tokens."""
    advantage_estimator: Literal["grpo"] = "grpo"
    """Rule from rewards to advantages; samples that bring their own advantages keep them."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation as well as subtracting its mean."""
    eps_clip: float = 0.2
    """The probability ratio is clipped below at 1 - eps_clip."""
    eps_clip_high: float | None = None
    """The probability ratio is clipped above at 1 + eps_clip_high; None takes eps_clip."""
    use_rollout_logprobs: bool = True
    """old_logprobs are the sampler's own; false recomputes them by the trainer before the update."""
    use_tis: bool = False
    """Weigh each token by min(p_trainer / p_rollout, tis_clip), without gradient (truncated importance sampling)."""
    tis_clip: float = 2.0
    """Largest importance weight with use_tis."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference model in the loss; 0 needs no reference."""
    kl_loss_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus in the loss."""

    @property
    def clip_range(self) -> tuple[float, float]:
        """Lowest and highest ratio that gets a gradient."""
        high = self.eps_clip if self.eps_clip_high is None else self.eps_clip_high
        return 1.0 - self.eps_clip, 1.0 + high

    @property
    def needs_reference(self) -> bool:
        """Whether reference_logprobs are part of the loss."""
        return self.loss_type == "policy_loss" and self.kl_loss_coef != 0.0

    @property
    def needs_old_pass(self) -> bool:
        """Whether a forward pass before the update must recompute old_logprobs."""
        return self.loss_type == "policy_loss" and not self.use_rollout_logprobs

    @property
    def trains_without_advantage(self) -> bool:
        """Whether a sample of advantage 0 still has a gradient, and so cannot be left out."""
        return self.loss_type == "sft_loss" or self.kl_loss_coef != 0.0 or self.entropy_coef != 0.0


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a batch is cut into micro-batches."""

    max_tokens_per_gpu: int = 8192
    """Most tokens of one micro-batch on one rank (times context_parallel_size); a longer sample gets a micro-batch alone."""

    def __post_init__(self) -> None:
        if self.max_tokens_per_gpu < 1:
            raise ConfigError(f"max_tokens_per_gpu: got {self.max_tokens_per_gpu}, expected at least 1")


class TrainerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a Policy is built from."""

    model: ModelSettings
    """The model and its layout."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Adam and the schedule."""
    algorithm: AlgorithmSettings = AlgorithmSettings()
    """Advantages and loss."""
    batch: BatchSettings = BatchSettings()
    """Micro-batches."""

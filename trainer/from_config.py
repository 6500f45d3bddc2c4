"""The run's config in the trainer's own terms."""

from pathlib import Path

from slimebus.config import RunConfig
from trainer.settings import AlgorithmSettings, BatchSettings, ModelSettings, OptimizerSettings, TrainerSettings


def settings_from(config: RunConfig, model_dir: Path) -> TrainerSettings:
    """What a Policy is built from."""
    t, o, a = config.trainer, config.optimizer, config.algorithm
    return TrainerSettings(
        model=ModelSettings(
            hf_checkpoint=str(model_dir),
            dtype=t.params_dtype,
            tensor_model_parallel_size=t.tensor_model_parallel_size,
            pipeline_model_parallel_size=t.pipeline_model_parallel_size,
            context_parallel_size=t.context_parallel_size,
            sequence_parallel=t.sequence_parallel,
            seed=config.seed + 1,  # megatron refuses 0
            megatron=config.megatron,
        ),
        optimizer=OptimizerSettings(
            lr=o.lr,
            min_lr=o.min_lr,
            lr_warmup_iters=o.lr_warmup_iters,
            lr_decay_iters=o.lr_decay_iters or config.rollout.num_rollout * config.rollout.num_steps_per_rollout,
            lr_decay_style=o.lr_decay_style,
            adam_beta1=o.adam_beta1,
            adam_beta2=o.adam_beta2,
            adam_eps=o.adam_eps,
            weight_decay=o.weight_decay,
            clip_grad=o.clip_grad,
        ),
        algorithm=AlgorithmSettings(
            loss_type=a.loss_type,
            advantage_estimator=a.advantage_estimator,
            grpo_std_normalization=a.grpo_std_normalization,
            eps_clip=a.eps_clip,
            eps_clip_high=a.eps_clip_high,
            use_rollout_logprobs=a.use_rollout_logprobs,
            use_tis=a.use_tis,
            tis_clip=a.tis_clip,
            kl_loss_coef=a.kl_loss_coef,
            kl_loss_type=a.kl_loss_type,
            entropy_coef=a.entropy_coef,
        ),
        batch=BatchSettings(max_tokens_per_gpu=t.max_tokens_per_gpu),
    )

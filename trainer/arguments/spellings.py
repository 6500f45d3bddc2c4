"""Megatron-LM's own spellings of options: the field each one means, or what decides instead; and the names that others have."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trainer.arguments.fields import enum_members, megatron_fields
from trainer.arguments.kinds import TEXT_CHOICES, Kind

AS_GIVEN = object()
"""The value is the one that follows the option."""


@dataclass(frozen=True)
class Spelling:
    """One option of Megatron-LM, with underscores. value: what it stands for alone, or AS_GIVEN."""

    field: str
    value: Any = AS_GIVEN


DDP_SWITCHES = ("average_in_collective", "pad_buckets_for_high_nccl_busbw", "reduce_scatter_with_fp32_accumulation")
OWN_NAMES: Mapping[str, Spelling] = {
    "accumulate_allreduce_grads_in_fp32": Spelling("grad_reduce_in_fp32", True),
    "check_for_nan_in_loss_and_grad": Spelling("check_for_nan_in_grad", True),
    **{f"ddp_{name}": Spelling(name, True) for name in DDP_SWITCHES},
    "ddp_bucket_size": Spelling("bucket_size"),
    "decoder_first_pipeline_num_layers": Spelling("num_layers_in_first_pipeline_stage"),
    "decoder_last_pipeline_num_layers": Spelling("num_layers_in_last_pipeline_stage"),
    **{f"disable_tp_comm_{name}": Spelling(f"tp_comm_{name}", False) for name in ("bulk_dgrad", "bulk_wgrad", "overlap_ag", "overlap_rs")},
    "no_bias_gelu_fusion": Spelling("bias_activation_fusion", False),
    "no_bias_swiglu_fusion": Spelling("bias_activation_fusion", False),
    "no_rope_fusion": Spelling("apply_rope_fusion", False),
    "num_experts": Spelling("num_moe_experts"),
    "num_layers_per_virtual_pipeline_stage": Spelling("virtual_pipeline_model_parallel_size"),
    "num_virtual_stages_per_pipeline_rank": Spelling("virtual_pipeline_model_parallel_size"),
    "recompute_activations": Spelling("recompute_granularity", "selective"),
    "swiglu": Spelling("gated_linear_unit", True),
    "use_cpu_optimizer_offload": Spelling("optimizer_cpu_offload", True),
    "use_flash_attn": Spelling("attention_backend", "flash"),
}
"""Those of Megatron-LM's argument parser; the fields themselves name more (`field(metadata=...)`)."""

INSTEAD: Mapping[str, str] = {
    "adlr_autoresume": "the trainer resumes from its newest checkpoint",
    "balance_data": "rows are packed, and dealt to the ranks by their tokens",
    "ckpt_format": "checkpoints are torch_dist",
    "data_path": "prompts are data.prompt_data",
    "distributed_backend": "NCCL where there is CUDA, else gloo",
    "exit_interval": "the run ends after rollout.num_rollout steps",
    "finetune": "a run starts from model.hf_checkpoint",
    "global_batch_size": "a step has rollout.rollout_batch_size x rollout.n_samples_per_prompt samples",
    "hf_checkpoint_path": "set model.hf_checkpoint",
    "load": "the trainer resumes from its newest checkpoint under run_dir",
    "log_interval": "every step is logged",
    "lr_decay_samples": "set optimizer.lr_decay_iters",
    "lr_warmup_fraction": "set optimizer.lr_warmup_iters",
    "lr_warmup_samples": "set optimizer.lr_warmup_iters",
    "make_vocab_size_divisible_by": "the vocabulary is padded to what tensor parallelism needs",
    "micro_batch_size": "samples are packed into rows of at most trainer.max_tokens_per_gpu tokens",
    "rampup_batch_size": "a step has rollout.rollout_batch_size x rollout.n_samples_per_prompt samples",
    "save": "checkpoints are under run_dir",
    "seq_length": "a sample is as long as it is; rollout.rollout_max_response_len bounds its response",
    "tokenizer_model": "the tokenizer is that of model.hf_checkpoint",
    "tokenizer_type": "the tokenizer is that of model.hf_checkpoint",
    "train_iters": "set rollout.num_rollout",
    "train_samples": "set rollout.num_rollout",
    "use_dynamic_batch_size": "rows are always packed up to trainer.max_tokens_per_gpu tokens",
}
"""Options of Megatron-LM (and of slime) that are no field of megatron-core, and what does it here."""

OTHER_NAMES: Mapping[str, str] = {
    "adv-estimator": "--advantage-estimator",
    "clip-ratio": "--eps-clip",
    "clip-ratio-high": "--eps-clip-high",
    "clip-ratio-low": "--eps-clip",
    "entropy-coeff": "--entropy-coef",
    "grad-clip": "--clip-grad",
    "lam": "--lambd",
    "learning-rate": "--lr",
    "loss-agg-mode": "--loss-aggregation",
    "max-response-length": "--rollout-max-response-len",
    "max-steps": "--num-rollout",
    "num-generations": "--n-samples-per-prompt",
    "ppo-epochs": "--num-steps-per-rollout",
    "ppo-max-token-len-per-gpu": "--max-tokens-per-gpu",
    "save-freq": "--save-interval",
    "temperature": "--rollout-temperature",
    "test-freq": "--eval-interval",
    "total-epochs": "--num-epoch",
    "train-batch-size": "--rollout-batch-size",
    "use-kl-loss": "--kl-loss-coef",
    "use-opd": "--advantage-estimator on_policy_distillation",
    "use-opsm": "--corrections opsm",
    "use-tis": "--corrections tis",
    "warmup-steps": "--lr-warmup-iters",
}
"""Flags of slime, verl and TRL without dashes -> what to write here; docs/algorithms.md has the same table."""


@cache
def spellings() -> Mapping[str, Spelling]:
    """Every spelling that is not the field's own name, and the field and value it means."""
    found = dict(OWN_NAMES)
    for field in megatron_fields().values():
        is_bool = field.annotation == "bool"
        for flag in field.spellings:
            value = (field.default == "False") if is_bool else AS_GIVEN
            found.setdefault(flag.removeprefix("--").replace("-", "_"), Spelling(field.name, value))
    return {name: spelling for name, spelling in found.items() if name not in megatron_fields() and spelling.field in megatron_fields()}


@cache
def kind_of(name: str) -> Kind:
    """The kind of the field `name`."""
    return Kind(megatron_fields()[name].annotation, TEXT_CHOICES.get(name, ()), enum_members())

"""Fields of Megatron's that cannot be chosen freely: what decides each, and why."""

import re
from collections.abc import Mapping

from slimebus.cli.config.schema import OptimizerConfig, TrainerConfig
from trainer.arguments.fields import megatron_fields

FSDP = "weights are published and saved from DistributedDataParallel's buffers, which FSDP has not"
GRAPHS = "packed rows have another length each time, and a CUDA graph has one"
INFERENCE = "Megatron's inference engine is not used: rollout workers sample"
ADAM = "only Adam is trained: the distributed optimizer and its checkpoints are made for it"
INITIAL = "the weights come from model.hf_checkpoint"
BY_ROW = "would depend on what else is in its row, and so on trainer.max_tokens_per_gpu"
IGNORED = "Megatron itself ignores it"
NO_METRIC = "nothing reads it: the metrics are those of docs/algorithms.md"


def each(names: str, why: str) -> dict[str, str]:
    """The same for each of these words."""
    return dict.fromkeys(names.split(), why)


FIXED: Mapping[str, str] = {
    # the schedule and the loss
    "calculate_per_token_loss": "the loss is already the mean over the trained tokens of all ranks; gradients would be multiplied",
    "variable_seq_lengths": "packed rows have different lengths",
    "virtual_pipeline_model_parallel_size": "leave it out, each rank has one chunk of the model",
    "align_param_gather": "it is for several chunks of the model on a rank",
    "overlap_moe_expert_parallel_comm": "its schedule takes other model calls than those of packed rows",
    "hybrid_context_parallel": "packing already balances the ranks",
    "hierarchical_context_parallel_sizes": "context parallelism has one level",
    "max_seqlen_per_dp_cp_rank": "set trainer.max_tokens_per_gpu",
    "enable_autocast": "trainer.params_dtype decides the precision",
    "fp16": "set trainer.params_dtype: bfloat16; loss scaling is not tested, and published weights are bfloat16",
    # routing
    "moe_expert_capacity_factor": f"what an expert drops, and so a token's logprob, {BY_ROW}",
    "moe_z_loss_coeff": f"each packed row weighs the same, however long it is: the gradient {BY_ROW}",
    "moe_router_force_load_balancing": "it routes at random, for benchmarks; every pass would have other logprobs",
    # optimizer and gradients
    "use_distributed_optimizer": "it always is distributed, so that a checkpoint loads into every layout",
    "num_distributed_optimizer_instances": "its shards span all data-parallel ranks, as its checkpoints do",
    "overlap_param_gather_with_optimizer_step": "it needs several chunks of the model on a rank; overlap_param_gather needs one",
    **each("decoupled_lr decoupled_min_lr", "every parameter has the learning rate of optimizer.lr"),
    "check_for_nan_in_grad": "trainer.on_nonfinite decides what becomes of a gradient that is not finite",
    "check_for_large_grads": "set optimizer.clip_grad; the norm is the metric grad_norm",
    **each("optimizer sgd_momentum muon_momentum muon_split_qkv muon_use_nesterov muon_scale_mode muon_fp32_matmul_prec", ADAM),
    **each("muon_num_ns_steps muon_tp_mode muon_extra_scale_factor", ADAM),
    "qk_clip": "it belongs to Muon; only Adam is trained",
    **each("log_num_zeros_in_grad log_max_attention_logit moe_per_layer_logging", NO_METRIC),
    "barrier_with_L1_time": "Megatron's timers are not used; metrics/*.trace.jsonl has the times",
    "moe_enable_routing_replay": "samples carry no routing",
    # where weights come from, and what is built of them
    **each("perform_initialization init_method_std embedding_init_method_std", INITIAL),
    "transformer_impl": "Transformer Engine is used where it is installed, else the same layers on plain torch",
    **each("init_model_with_meta_device use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy fsdp_double_buffer", FSDP),
    **each("outer_dp_sharding_strategy suggested_communication_unit_size fsdp_manual_registration keep_fp8_transpose_cache", FSDP),
    **each("cuda_graph_impl enable_cuda_graph external_cuda_graph", GRAPHS),
    **each("flash_decode inference_rng_tracker use_inference_optimized_layers inference_fuse_tp_communication", INFERENCE),
    "cache_mla_latents": INFERENCE,
    "moe_extended_tp": "Megatron itself ignores it; set expert_tensor_parallel_size",
    **each("test_mode async_tensor_model_parallel_allreduce moe_token_dropping fp8_interval", IGNORED),
}
"""Field -> why it has the value that is in force, and no other."""
NOT_DEFAULT = {"variable_seq_lengths": True, "use_distributed_optimizer": True, "barrier_with_L1_time": False}
"""The values in force that are not Megatron's own defaults."""

ARCHITECTURE = frozenset(
    re.findall(
        r"\w+",
        """
    num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale softmax_type
    apply_residual_connection_post_layernorm layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias
    gated_linear_unit glu_linear_offset activation_func_clamp_value num_moe_experts rotary_interleaved window_size
    window_attn_skip_freq normalization qk_layernorm qk_l2_norm attention_output_gate multi_latent_attention no_rope_freq
    experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads
    moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size moe_router_topk
    moe_router_num_groups moe_router_group_topk moe_router_topk_limited_devices moe_router_pre_softmax
    moe_router_topk_scaling_factor moe_router_score_function moe_router_enable_expert_bias moe_latent_size mrope_section
    is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads heterogeneous_block_specs mtp_num_layers
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_base rotary_percent
    rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim
    """,
    )
)
"""What the model folder's config.json decides. Given with the same value they are accepted, so that a script's model arguments may stay."""


def fields_of_other_sections() -> dict[str, str]:
    """Fields that another section of the config decides: what to set instead."""
    sections = {"trainer": TrainerConfig, "optimizer": OptimizerConfig}
    own = {field: f"set {section}.{field}" for section, config in sections.items() for field in config.__struct_fields__}
    precision = dict.fromkeys(("bf16", "params_dtype", "pipeline_dtype", "autocast_dtype"), "set trainer.params_dtype")
    return {name: instead for name, instead in (precision | own).items() if name in megatron_fields()}


NEEDS: Mapping[str, str] = {
    **each("recompute_method recompute_num_layers recompute_modules distribute_saved_activations", "recompute_granularity"),
    "overlap_param_gather": "overlap_grad_reduce",
    **each("optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload"),
    **each("pin_cpu_grads pin_cpu_params", "optimizer_cpu_offload"),
    **each("main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype", "use_precision_aware_optimizer"),
    **each("initial_loss_scale min_loss_scale loss_scale_window hysteresis", "fp16"),
    **each("offload_modules min_offloaded_tensor_size", "fine_grained_activation_offloading"),
    **each("cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering", "cpu_offloading"),
    "wgrad_deferral_limit": "defer_embedding_wgrad_compute",
    **each("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", "first_last_layers_bf16"),
    "kitchen_attention_backend": "use_kitchen_attention",
    **each("fp8_param_gather fp8_param fp8_margin fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_dot_product_attention", "fp8"),
    **each("fp8_multi_head_attention tp_only_amax_red first_last_layers_bf16", "fp8"),
    **each("fp4_param fp4_quantizer_factory", "fp4"),
    **each("tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad", "tp_comm_overlap"),
    **each("tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1", "tp_comm_overlap"),
}
"""Field -> the one without which it changes nothing (or, for the overlaps, without which Megatron-LM refuses it)."""

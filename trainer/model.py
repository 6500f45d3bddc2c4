"""The GPT that is trained: built from a Hugging Face directory by mbridge, wrapped for data parallelism. One chunk a rank."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.transformer.module import Float16Module

from slimebus.errors import ConfigError
from trainer import cuda_bridge, parallel, te_names
from trainer.hf_folder import check_vocabulary, read_config
from trainer.megatron_fields import split_megatron_options
from trainer.settings import ModelSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """The module as megatron's schedules want it, and what is needed to name its weights."""

    module: Any
    """DistributedDataParallel around the GPT."""
    config: Any
    """Its TransformerConfig."""
    bridge: Any
    """mbridge's map between megatron's and Hugging Face's names."""
    settings: ModelSettings
    """What it was built from."""
    vocab_size: int
    """Rows of the embedding in Hugging Face's model, without padding."""

    @property
    def gpt(self) -> Any:
        """The GPTModel inside the wrappers."""
        module = self.module
        while hasattr(module, "module"):
            module = module.module
        return module


def build_model(settings: ModelSettings, *, is_trained: bool = True) -> Model:
    """Build this rank's part, load its weights and wrap it for training, or leave it frozen. `parallel.start` comes first.

    Raises DataError when the directory is not a model or its tokenizer does not match, ConfigError for an unknown family or option.
    """
    cuda_bridge.repair_megatron()
    check_vocabulary(settings.hf_checkpoint)
    config = read_config(settings.hf_checkpoint)
    check_division(settings, config)
    vocab_size = int(config["vocab_size"])
    options = split_megatron_options(settings.megatron)
    bridge = make_bridge(settings, options["TransformerConfig"])
    gpt = make_gpt(bridge)
    bridge.load_weights([gpt], settings.hf_checkpoint)
    clear_padding(gpt, vocab_size)
    module = Float16Module(bridge.config, gpt) if settings.dtype == "bfloat16" else gpt
    if is_trained:
        module = DistributedDataParallel(bridge.config, ddp_config(options["DistributedDataParallelConfig"]), module)
        bridge.config.finalize_model_grads_func = finalize_model_grads
    else:
        module.requires_grad_(False)
    return Model(module=module, config=bridge.config, bridge=bridge, settings=settings, vocab_size=vocab_size)


def check_division(settings: ModelSettings, config: dict[str, Any]) -> None:
    """Raise ConfigError unless layers and heads divide by the ranks that share them."""
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    split = {"num_hidden_layers": ("pipeline", pipeline), "num_attention_heads": ("tensor", tensor)}
    for name, (kind, size) in split.items():
        if name in config and config[name] % size:
            raise ConfigError(
                f"{settings.hf_checkpoint}: {name} {config[name]} does not divide by {kind}_model_parallel_size {size};"
                f" choose a divisor of {config[name]}"
            )


def ddp_config(options: dict[str, Any]) -> DistributedDataParallelConfig:
    """Gradients in fp32, sharded for the distributed optimizer, reduced once a step, unless the options say otherwise."""
    chosen = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **options}
    return DistributedDataParallelConfig(**chosen)


def make_bridge(settings: ModelSettings, options: dict[str, Any]) -> Any:
    """mbridge's Bridge for the model family that config.json names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(settings.hf_checkpoint)
    rope = getattr(config, "rope_parameters", None) or {}
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):  # transformers 5 moved them; mbridge 0.15 reads these
        if not hasattr(config, name):
            setattr(config, name, rope.get(name, default))
    bridge = new_bridge(config, DTYPES[settings.dtype])
    if settings.tensor_model_parallel_size > 1:
        bridge.make_vocab_size_divisible_by = settings.tensor_model_parallel_size
    bridge.set_extra_args(**transformer_options(settings) | options)
    return bridge


def new_bridge(config: Any, dtype: torch.dtype) -> Any:
    """The bridge of the family that `config` names. Raises ConfigError when mbridge has none."""
    from mbridge import AutoBridge
    from mbridge.core.bridge import _MODEL_REGISTRY

    family = _MODEL_REGISTRY.get(config.model_type)
    if family is None:
        known = ", ".join(sorted(_MODEL_REGISTRY))
        raise ConfigError(f"model_type {config.model_type!r} has no weight map in mbridge; it has {known}")
    # a model with tied embeddings changes the map of its class: give it one of its own, or the next model reads wrong names
    shared = family._DIRECT_MAPPING
    family._DIRECT_MAPPING = dict(shared)
    try:
        bridge = AutoBridge.from_config(config, dtype=dtype)
        bridge._DIRECT_MAPPING = family._DIRECT_MAPPING
    finally:
        family._DIRECT_MAPPING = shared
    return bridge


def transformer_options(settings: ModelSettings) -> dict[str, Any]:
    """TransformerConfig fields that follow from the settings, and what must be off without Transformer Engine's kernels."""
    without_te = not te_names.has_transformer_engine()
    if without_te:
        te_names.install()
    unfused = dict.fromkeys(("masked_softmax_fusion", "persist_layer_norm", "bias_dropout_fusion", "gradient_accumulation_fusion"), False)
    return {
        **(unfused if without_te else {}),
        "apply_rope_fusion": True,  # without Transformer Engine this is attention.rotate_packed
        "bias_activation_fusion": False,
        "use_te_activation_func": True,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "perform_initialization": True,  # also marks which parameters are split over tensor-parallel ranks
        "sequence_parallel": settings.sequence_parallel,
        "batch_p2p_comm": False,  # with gloo and two pipeline stages batched messages carry wrong numbers
        "variable_seq_lengths": True,
    }


def make_gpt(bridge: Any) -> Any:
    """The GPTModel of this pipeline stage, on this rank's device, with random weights."""
    provide = bridge._model_provider([])
    gpt = provide(pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage())
    gpt.model_type = ModelType.encoder_or_decoder
    for parameter in gpt.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    return gpt.to(parallel.device())


def clear_padding(gpt: Any, vocab_size: int) -> None:
    """Zero the embedding rows that only fill the vocabulary up to a multiple of the tensor-parallel size."""
    for name, parameter in gpt.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            first = parameter.shape[0] * parallel_state.get_tensor_model_parallel_rank()
            parameter.data[max(0, vocab_size - first) :] = 0

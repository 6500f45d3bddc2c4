"""The GPT that is trained: built from a Hugging Face directory by mbridge, wrapped for data parallelism. One chunk a rank."""

from dataclasses import dataclass
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.transformer.module import Float16Module
from transformers import AutoConfig

from slimebus.bus.errors import ConfigError
from slimebus.cli.config import RunConfig
from slimebus.cli.config.schema import TrainerConfig
from trainer.compat import cpu_compat, te_compat
from trainer.model import parallel
from trainer.model.megatron_fields import split_megatron_options


@dataclass(frozen=True)
class Model:
    """The module as megatron's schedules want it, and what is needed to name its weights."""

    module: Any
    """DistributedDataParallel around the GPT."""
    gpt: Any
    """The GPTModel inside the wrappers."""
    bridge: Any
    """mbridge's map between megatron's and Hugging Face's names."""
    folder: str
    """The Hugging Face directory that it was built from."""
    vocab_size: int
    """Rows of the embedding in Hugging Face's model, without padding."""

    @property
    def config(self) -> Any:
        """Its TransformerConfig."""
        return self.bridge.config


def build_model(config: RunConfig, folder: str, *, is_trained: bool = True) -> Model:
    """Build this rank's part, load its weights and wrap it for training, or leave it frozen. `parallel.start` comes first.

    Raises ConfigError for an unknown family or option.
    """
    cpu_compat.repair_megatron()
    options = split_megatron_options(config.megatron)
    bridge = make_bridge(config.trainer, folder, options["TransformerConfig"])
    gpt, vocab_size = make_gpt(bridge), int(bridge.hf_config.vocab_size)
    bridge.load_weights([gpt], folder)
    clear_padding(gpt, vocab_size)
    module = Float16Module(bridge.config, gpt) if bridge.config.bf16 else gpt
    if is_trained:
        # gradients in fp32, sharded for the distributed optimizer, reduced once a step, unless the options say otherwise
        chosen = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **options["DistributedDataParallelConfig"]}
        module = DistributedDataParallel(bridge.config, DistributedDataParallelConfig(**chosen), module)
        bridge.config.finalize_model_grads_func = finalize_model_grads
    else:
        module.requires_grad_(False)
    return Model(module, gpt, bridge, folder, vocab_size)


def make_bridge(settings: TrainerConfig, folder: str, options: dict[str, Any]) -> Any:
    """mbridge's Bridge for the model family that config.json names. Raises ConfigError when mbridge has none."""
    config = AutoConfig.from_pretrained(folder)
    rope = getattr(config, "rope_parameters", None) or {}
    for name, default in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):  # transformers 5 moved them; mbridge 0.15 reads these
        if not hasattr(config, name):
            setattr(config, name, rope.get(name, default))
    family = _MODEL_REGISTRY.get(config.model_type)
    if family is None:
        known = ", ".join(sorted(_MODEL_REGISTRY))
        raise ConfigError(f"model_type {config.model_type!r} has no weight map in mbridge; it has {known}")
    # a model with tied embeddings changes the map of its class: give it one of its own, or the next model reads wrong names
    own = type(family.__name__, (family,), {"_DIRECT_MAPPING": dict(family._DIRECT_MAPPING)})
    bridge = own(config, dtype=getattr(torch, settings.params_dtype))
    if settings.tensor_model_parallel_size > 1:
        bridge.make_vocab_size_divisible_by = settings.tensor_model_parallel_size
    bridge.set_extra_args(**{**transformer_options(), "sequence_parallel": settings.sequence_parallel, **options})
    return bridge


def transformer_options() -> dict[str, Any]:
    """TransformerConfig fields of every model, and what must be off without Transformer Engine's kernels."""
    unfused = ("masked_softmax_fusion", "persist_layer_norm", "bias_dropout_fusion", "gradient_accumulation_fusion")
    without_te = te_compat.install()
    return {
        **(dict.fromkeys(unfused, False) if without_te else {}),
        "apply_rope_fusion": True,  # without Transformer Engine this is attention.rotate_packed
        "bias_activation_fusion": False,
        "use_te_activation_func": not without_te,
        "use_cpu_initialization": not torch.cuda.is_available(),
    }


def make_gpt(bridge: Any) -> Any:
    """The GPTModel of this pipeline stage, on this rank's device, with random weights."""
    provide = bridge._model_provider([])
    gpt = provide(pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage())
    return gpt.to(parallel.device())


def clear_padding(gpt: Any, vocab_size: int) -> None:
    """Zero the embedding rows that only fill the vocabulary up to a multiple of the tensor-parallel size."""
    for name, parameter in gpt.named_parameters():
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            first = parameter.shape[0] * parallel_state.get_tensor_model_parallel_rank()
            parameter.data[max(0, vocab_size - first) :] = 0

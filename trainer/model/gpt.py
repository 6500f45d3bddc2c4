"""The GPT that is trained: built and loaded from a Hugging Face directory, wrapped for data parallelism. One chunk a rank."""

import functools
import logging
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.nn import functional
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from slimebus.config import RunConfig
from slimebus.config.schema import TrainerConfig
from trainer.arguments.megatron_options import make_config, split_megatron_options
from trainer.compat import cpu_compat, te_compat
from trainer.hf.families import Family
from trainer.hf.hf_map import HfMap, hf_map, read_hf_config, rotary_percent, transformer_fields
from trainer.model import parallel
from trainer.model.hf_load import load_weights

log = logging.getLogger("trainer")

Role = Literal["policy", "value"]
LAYOUT = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")


@dataclass(frozen=True)
class Model:
    """The module as megatron's schedules want it, and what is needed to name its weights."""

    module: Any
    """DistributedDataParallel around the GPT."""
    gpt: Any
    """The GPTModel inside the wrappers."""
    hf: HfMap
    """The map between megatron's and Hugging Face's weights."""
    folder: str
    """The Hugging Face directory that it was built from."""
    role: Role = "policy"
    """policy: the module gives hidden states [1, t, h], what `head` is applied to. value: a value for each position, [1, t, 1] f32."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding in Hugging Face's model, without padding."""
        return self.hf.vocab_size

    @property
    def head(self) -> torch.Tensor:
        """The weight of the output layer, [V / tp, h], on the last pipeline stage."""
        gpt = self.gpt
        return gpt.shared_embedding_or_output_weight() if gpt.share_embeddings_and_output_weights else gpt.output_layer.weight

    @property
    def config(self) -> Any:
        """Its TransformerConfig."""
        return self.gpt.config


def build_model(config: RunConfig, folder: str, *, role: Role = "policy") -> Model:
    """Build this rank's part, load its weights and wrap it for training. `parallel.start` comes first.

    Raises ConfigError for a family or option that cannot be trained, and for weights that are not the model's.
    """
    cpu_compat.repair_megatron()
    options = split_megatron_options(config.megatron)
    family, hf_config = read_hf_config(folder, config.model.family)
    hf = hf_map(family, hf_config)
    fields = {**transformer_options(), **transformer_fields(family, hf_config)}
    settings = transformer_config(config.trainer, fields, options["TransformerConfig"])
    warn_of_balancing(settings)
    gpt = make_gpt(settings, family, hf_config)
    module = Float16Module(settings, gpt) if settings.bf16 else gpt
    load_weights(gpt, hf, folder, settings.num_layers)  # after the wrapper, which would round the router's correction bias to bfloat16
    if role == "value":
        put_value_head(gpt, parallel.device())
    elif gpt.post_process:
        gpt.output_layer.forward = functools.partial(head_input, sequence_parallel=settings.sequence_parallel)
    # gradients in fp32, sharded for the distributed optimizer, reduced once a step, unless the options say otherwise
    chosen = {"grad_reduce_in_fp32": True, "use_distributed_optimizer": True, **options["DistributedDataParallelConfig"]}
    module = DistributedDataParallel(settings, make_config(DistributedDataParallelConfig, chosen), module)
    settings.finalize_model_grads_func = finalize_model_grads
    return Model(module, gpt, hf, folder, role)


def transformer_config(trainer: TrainerConfig, fields: dict[str, Any], options: dict[str, Any]) -> Any:
    """The TransformerConfig of the model, this layout and these options. Raises ConfigError where Megatron refuses them."""
    dtype = parallel.params_dtype(trainer)
    chosen = {
        **fields,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        **{name: getattr(trainer, name) for name in LAYOUT},
        "expert_tensor_parallel_size": 1,
        "variable_seq_lengths": True,  # rows are of unequal length, which pipeline stages must be told
        "moe_token_dispatcher_type": "alltoall",  # also of dense models: megatron asks it of variable_seq_lengths
        "batch_p2p_comm": False,
        "overlap_p2p_comm": False,
        **options,
    }
    return make_config(MLATransformerConfig if chosen.get("multi_latent_attention") else TransformerConfig, chosen)


def warn_of_balancing(settings: Any) -> None:
    """Say what a balancing loss depends on, in one line of rank 0's log."""
    coefficients = settings.moe_aux_loss_coeff if isinstance(settings.moe_aux_loss_coeff, list) else [settings.moe_aux_loss_coeff]
    if parallel.is_main_rank() and settings.moe_router_load_balancing_type != "none" and any(coefficients):
        text = "is taken of each packed row, and rows weigh the same: it depends on trainer.max_tokens_per_gpu and the number of ranks"
        log.warning("megatron.moe_aux_loss_coeff: the balancing loss %s", text)


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


def make_gpt(settings: Any, family: Family, hf_config: Any) -> Any:
    """The GPTModel of this pipeline stage, on this rank's device, with random weights."""
    spec = get_gpt_decoder_block_spec(settings, use_transformer_engine=True)
    if family.is_glm4:
        add_post_norms(spec)
    ranks = settings.tensor_model_parallel_size
    gpt = GPTModel(
        settings,
        spec,
        vocab_size=-(-hf_config.vocab_size // ranks) * ranks,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(hf_config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_percent=rotary_percent(hf_config),
        rotary_base=hf_config.rope_parameters["rope_theta"],
    )
    if hf_config.rope_parameters["rope_type"] == "llama3":  # megatron's own has fixed wavelengths
        gpt.rotary_pos_emb.inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](hf_config, parallel.device())
    return gpt.to(parallel.device())


def head_input(hidden: torch.Tensor, *, sequence_parallel: bool, **options: Any) -> tuple[torch.Tensor, None]:
    """In place of the output layer's own product, as its logits of a whole row would not fit: its input, [s, b, h], whole on each
    tensor-parallel rank. The loss applies the layer to some tokens at a time (logprobs.py).
    """
    return (gather_from_sequence_parallel_region if sequence_parallel else copy_to_tensor_model_parallel_region)(hidden), None


def with_post_norm(linear: Any, norm: Any) -> Any:
    """`linear`, a row-parallel layer class, followed by a norm of its output: its parameter `post_norm.weight`. Megatron's layers have
    no place for a norm between it and the residual (GLM-4, arXiv:2406.12793).
    """

    class NormedLinear(linear):
        def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
            super().__init__(input_size, output_size, config=config, **options)
            self.post_norm = norm(config=config, hidden_size=output_size, eps=config.layernorm_epsilon)

        def forward(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
            out, bias = super().forward(x, *args, **options)
            return self.post_norm(out), bias

    return NormedLinear


def add_post_norms(block: Any) -> None:
    """Change a decoder's spec, in place: every layer gets both norms. The layers of a stage may share one spec."""
    for layer in {id(spec): spec.submodules for spec in block.layer_specs}.values():
        attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
        attention.linear_proj = with_post_norm(attention.linear_proj, block.layer_norm)
        mlp.linear_fc2 = with_post_norm(mlp.linear_fc2, block.layer_norm)


class ValueHead(torch.nn.Module):
    """[s, b, 1] f32 from hidden states [s, b, h], called as megatron's output layer. Zero at first: all values begin at 0.

    Whole on each tensor-parallel rank; with sequence parallelism each computes its part of s, and all get all of it.
    """

    def __init__(self, settings: Any, device: torch.device) -> None:
        super().__init__()
        self.sequence_parallel = bool(settings.sequence_parallel)
        self.weight = torch.nn.Parameter(torch.zeros(1, settings.hidden_size, dtype=settings.params_dtype, device=device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=settings.params_dtype, device=device))
        for parameter in self.parameters():  # megatron then adds up the gradients of the parts
            parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, weight: Any = None, runtime_gather_output: Any = None) -> tuple[torch.Tensor, None]:
        values = functional.linear(hidden.float(), self.weight.float(), self.bias.float())
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def put_value_head(gpt: Any, device: torch.device) -> None:
    """Replace the output layer of a loaded GPTModel; every pipeline stage calls it."""
    if gpt.post_process:
        gpt.output_layer = ValueHead(gpt.config, device)
    gpt.share_embeddings_and_output_weights = False  # the embedding is no output layer any more


INSTALL = "pip install --no-build-isolation 'slimebus[gpu]'"


def kernels_in_use(model: Model) -> str:
    """One line: device, dtype, attention and norm with the reason."""
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    if not torch.cuda.is_available():
        return f"on CPU in {dtype}: attention and RMSNorm of slimebus in plain torch, as torch finds no CUDA device"
    where = f"on {torch.cuda.get_device_name()} in {dtype}"
    if not gpt_layer_specs.HAVE_TE:
        return f"{where}: torch's scaled_dot_product_attention and RMSNorm, as Transformer Engine is not installed ({INSTALL})"
    backend, flash = model.config.attention_backend.name, version_of("flash-attn")
    by_itself = f"chosen from flash-attn {flash} and cuDNN" if flash else "of cuDNN, as flash-attn is not installed"
    attention = by_itself if backend == "auto" else f"as megatron.attention_backend says: {backend}"
    return f"{where}: RMSNorm of Transformer Engine {version_of('transformer-engine')}, its attention {attention}"


def version_of(package: str) -> str:
    """Of an installed package; empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""

"""Megatron's options judged by Megatron's own classes: by themselves, with the model, in the layout. Imports Megatron.

What only a rank can answer (an import of Transformer Engine, a CUDA version) ends the check without a verdict: ranks check again, in full.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import fields

import msgspec
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig

from slimebus.bus.errors import ConfigError
from slimebus.config.schema import TrainerConfig
from trainer.arguments.checks import CheckReply, CheckRequest
from trainer.arguments.megatron_options import (
    MegatronOptions,
    contradiction_text,
    expert_ranks,
    make_config,
    read_options,
    split_megatron_options,
    yaml_text,
)
from trainer.compat.cpu_compat import library_warnings_ignored
from trainer.hf.families import CONFIG_KEYS
from trainer.model.gpt import transformer_config, transformer_options

OF_SOME_MODELS = ("num_moe", "moe_", "q_lora", "kv_lora", "qk_", "v_head")
"""Of the names in CONFIG_KEYS, those that not every model's config.json says something of."""
Found = Iterator[tuple[str, str]]


def main() -> None:
    """Read a CheckRequest from stdin, write its CheckReply to stdout."""
    reply = check(msgspec.convert(json.load(sys.stdin), CheckRequest))
    sys.stdout.buffer.write(msgspec.json.encode(reply))


def check(request: CheckRequest) -> CheckReply:
    """What is wrong with the options, by themselves, with this model and in this layout."""
    options = read_options(request.given, request.other_names)
    for find in (_contradicts_model, _experts, _pipeline, _recompute):
        for name, text in find(options, request):
            options.problems.setdefault(options.keys.get(name, name), text)
    if options.problems:
        return CheckReply(options.problems)
    refused = refusal(request) if request.shape else ""
    why = f"Megatron's own check of {', '.join(sorted(options.keys.values()))} in this layout"
    return CheckReply({}, f"{refused} ({why})" if refused else "", expert_ranks(request.given))


def refusal(request: CheckRequest) -> str:
    """Megatron's words; empty where it takes the options, or gives no verdict. With params_dtype auto only a rank knows which dtype it is,
    so refused is what neither would take.
    """
    trainer = request.trainer
    dtypes = ["bfloat16", "float32"] if trainer.params_dtype == "auto" else [trainer.params_dtype]
    refusals = [_refusal(request, msgspec.structs.replace(trainer, params_dtype=dtype)) for dtype in dtypes]
    return refusals[0] if all(refusals) else ""


def _refusal(request: CheckRequest, trainer: TrainerConfig) -> str:
    options, is_latent = split_megatron_options(request.given), "kv_lora_rank" in request.shape
    known = {field.name for field in fields(MLATransformerConfig if is_latent else TransformerConfig)}
    shape = {name: value for name, value in request.shape.items() if name in known} | {"multi_latent_attention": is_latent}
    try:
        with library_warnings_ignored():
            transformer_config(trainer, {**transformer_options(), **shape}, options["TransformerConfig"])
            make_config(DistributedDataParallelConfig, options["DistributedDataParallelConfig"])
    except ConfigError as refused:
        return refused.text
    return ""


def _contradicts_model(options: MegatronOptions, request: CheckRequest) -> Found:
    shape = request.shape
    for name, value in options.model.items():
        if name in shape and shape[name] != value:
            yield name, contradiction_text(value, shape[name])
        elif shape and name not in shape and name in CONFIG_KEYS and name.startswith(OF_SOME_MODELS):
            yield name, f"{yaml_text(value)}, but the model's config.json has nothing of the kind; the model folder decides, leave it out"


def _experts(options: MegatronOptions, request: CheckRequest) -> Found:
    experts, size = request.shape.get("num_moe_experts"), options.values.get("expert_model_parallel_size") or 1
    if not request.shape:
        return
    if experts is None:
        for name, value in options.values.items():
            is_of_experts = name.startswith(("expert_", "moe_")) and name != "moe_token_dispatcher_type"  # which pipelines need too
            if is_of_experts and value not in (1, None, False):
                yield name, f"{yaml_text(value)}, but the model has no experts (config.json); leave it out"
        return
    if experts % size:
        yield "expert_model_parallel_size", f"{size} does not divide the model's {experts} experts"
    if request.trainer.tensor_model_parallel_size > 1 and not request.trainer.sequence_parallel:
        yield "expert_model_parallel_size", "experts with tensor parallelism need trainer.sequence_parallel: true"


def _pipeline(options: MegatronOptions, request: CheckRequest) -> Found:
    if request.trainer.pipeline_model_parallel_size > 1:
        return
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout"):
        if options.values.get(name) is not None:
            yield name, "there is one pipeline stage; set trainer.pipeline_model_parallel_size"


def _recompute(options: MegatronOptions, request: CheckRequest) -> Found:
    given = options.values.get("recompute_granularity")
    if given == "selective" and options.values.get("recompute_method"):
        yield "recompute_method", "recompute_granularity selective recomputes its modules in every layer; leave it out"
    if given == "full" and options.values.get("recompute_modules"):
        yield "recompute_modules", "recompute_granularity full recomputes whole layers; leave it out, or set selective"

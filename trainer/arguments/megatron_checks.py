"""Megatron's own checks of its configs (`__post_init__`), asked of a process of their own before any rank starts.

python -m trainer.arguments.megatron_checks  < Asked   writes why Megatron refuses them, or nothing

Importing Megatron takes seconds and most of a gigabyte, which whoever checks a config or starts ranks does not need. What only a rank can
answer (an import of Transformer Engine, a CUDA version) ends the check without a verdict: the ranks make it again, in full.
"""

import logging
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from slimebus.cli.config import RunConfig

log = logging.getLogger("trainer")

ASK_S = 120.0
"""As long as a busy machine may take to import Megatron."""
SECTION = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "sequence_parallel")
ALWAYS = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False, "overlap_p2p_comm": False}
"""What trainer/model/gpt.py sets for every model."""


class Asked(msgspec.Struct):
    """given: the `megatron` section. layout: of the trainer section, and what config.json says. dtypes: one of them must be taken."""

    given: dict[str, Any]
    layout: dict[str, Any]
    dtypes: list[str]


def megatron_refusal(config: RunConfig, shape: Mapping[str, Any]) -> str | None:
    """Why Megatron would refuse the options with this model and layout, in its own words; None where it would not, or cannot be asked."""
    dtype = config.trainer.params_dtype  # auto: which it is only a rank knows, so refused is what neither would take
    asked = Asked(
        given=dict(config.megatron),
        layout={**shape, **{name: getattr(config.trainer, name) for name in SECTION}},
        dtypes=["bfloat16", "float32"] if dtype == "auto" else [dtype],
    )
    return refusal_elsewhere(asked) or None


def refusal_elsewhere(asked: Asked) -> str:
    """`refusal`, from a process that imports Megatron and ends; empty, with a warning, where that fails or takes longer than ASK_S."""
    command = [sys.executable, "-P", "-m", "trainer.arguments.megatron_checks"]
    try:
        done = subprocess.run(command, input=msgspec.json.encode(asked), capture_output=True, timeout=ASK_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as bad:
        lines = (bad.stderr or b"").decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else str(bad)
        log.warning("Megatron's own checks of its options could not be made before the ranks start, which make them again: %s", why)
        return ""
    return done.stdout.decode()


def refusal(asked: Asked) -> str:
    """Megatron's words; empty where it takes one of the dtypes, or gives no verdict."""
    refusals = [_refusal(asked, dtype) for dtype in asked.dtypes]
    return refusals[0] if all(refusals) else ""


def _refusal(asked: Asked, dtype: str) -> str:
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from trainer.compat.cpu_compat import library_warnings_ignored
    from trainer.model.gpt import transformer_options
    from trainer.model.megatron_fields import split_megatron_options

    made, options = getattr(torch, dtype), split_megatron_options(asked.given)
    model: Any = MLATransformerConfig if "kv_lora_rank" in asked.layout else TransformerConfig
    known = {field.name for field in fields(model)}
    shape = {name: value for name, value in asked.layout.items() if name in known}
    dtypes = {"params_dtype": made, "pipeline_dtype": made, "bf16": made is torch.bfloat16}
    chosen = {**transformer_options(), **shape, **dtypes, "expert_tensor_parallel_size": 1, **ALWAYS, **options["TransformerConfig"]}
    try:
        with library_warnings_ignored():
            model(**chosen)
            DistributedDataParallelConfig(**options["DistributedDataParallelConfig"])
    except (ValueError, AssertionError, NotImplementedError) as refused:
        return " ".join(str(refused).split())
    return ""


if __name__ == "__main__":
    from trainer.compat.cpu_compat import import_megatron

    import_megatron()
    sys.stdout.write(refusal(msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)))

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
from slimebus.cli.config.schema import TrainerConfig

log = logging.getLogger("trainer")

ASK_S = 120.0
"""As long as a busy machine may take to import Megatron."""


class Asked(msgspec.Struct):
    """given: the `megatron` section. shape: what config.json says, by Megatron's names."""

    given: dict[str, Any]
    trainer: TrainerConfig
    shape: dict[str, Any]


def megatron_refusal(config: RunConfig, shape: Mapping[str, Any]) -> str | None:
    """Why Megatron would refuse the options with this model and layout, in its own words; None where it would not, or cannot be asked."""
    return refusal_elsewhere(Asked(dict(config.megatron), config.trainer, dict(shape))) or None


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
    """Megatron's words; empty where it takes the options, or gives no verdict. With params_dtype auto only a rank knows which dtype it is,
    so refused is what neither would take.
    """
    dtypes = ["bfloat16", "float32"] if asked.trainer.params_dtype == "auto" else [asked.trainer.params_dtype]
    refusals = [_refusal(asked, msgspec.structs.replace(asked.trainer, params_dtype=dtype)) for dtype in dtypes]
    return refusals[0] if all(refusals) else ""


def _refusal(asked: Asked, trainer: TrainerConfig) -> str:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    from trainer.compat.cpu_compat import library_warnings_ignored
    from trainer.model.gpt import transformer_config, transformer_options
    from trainer.model.megatron_fields import split_megatron_options

    options, is_latent = split_megatron_options(asked.given), "kv_lora_rank" in asked.shape
    known = {field.name for field in fields(MLATransformerConfig if is_latent else TransformerConfig)}
    shape = {name: value for name, value in asked.shape.items() if name in known} | {"multi_latent_attention": is_latent}
    try:
        with library_warnings_ignored():
            transformer_config(trainer, {**transformer_options(), **shape}, options["TransformerConfig"])
            DistributedDataParallelConfig(**options["DistributedDataParallelConfig"])
    except (ValueError, AssertionError, NotImplementedError) as refused:
        return " ".join(str(refused).split())
    return ""


if __name__ == "__main__":
    from trainer.compat.cpu_compat import import_megatron

    import_megatron()
    sys.stdout.write(refusal(msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)))

"""Which attention and norm a model is built with, and why: for the log of a run's start."""

from importlib import metadata

import torch
from megatron.core.models.gpt import gpt_layer_specs

from trainer.model.gpt import Model

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

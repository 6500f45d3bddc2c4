"""Tiny random models on disk, and the Python of the real SGLang that may serve them."""

import os
from pathlib import Path
from typing import Any

import pytest
from slimebus_command import ROOT

SHAPE = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
SERVED = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "eos_token_id": 2, "initializer_range": 0.02,
}  # fmt: skip
"""What the real SGLang takes on a CPU too."""
SPECIAL_TOKENS = ["<|endoftext|>", "<|start|>", "<|end|>"]


def save_model(path: Path, family: str = "Qwen3", *, seed: int = 0, dtype: str = "bfloat16", **changes: Any) -> Any:
    """Save a random model of the family; returns it as float32 with the saved (rounded) weights. changes: of SHAPE."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * config.initializer_range)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    # Loaded again: `.to(bfloat16)` also rounded the rotary frequencies, which are not weights.
    return type(model).from_pretrained(path, dtype=torch.float32).eval()


def save_served(path: Path, seed: int = 0) -> Any:
    """Save a model that the real SGLang takes, with a tokenizer of bytes; returns it as save_model does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(SPECIAL_TOKENS + letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|endoftext|>").save_pretrained(path)
    return save_model(path, seed=seed, **SERVED)


def sglang_python() -> str:
    """The Python that has the real SGLang, and skips the test without."""
    found = os.environ.get("SLIMEBUS_SGLANG_PYTHON") or str(ROOT / ".venv-sglang/bin/python")
    if not Path(found).exists():
        pytest.skip("the real SGLang is not installed: run bin/install-sglang, or set SLIMEBUS_SGLANG_PYTHON")
    return found

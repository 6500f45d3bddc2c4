"""A tiny model on disk, and an engine core on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_model import SHAPE, save_model


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """(directory, transformers model) of a tiny Qwen3."""
    path = tmp_path_factory.mktemp("qwen3")
    return path, save_model(path, head_dim=16, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def core_of() -> Callable[..., Any]:
    """Builds an EngineCore on a model directory."""

    def build(path: Path, *, max_running: int = 8, kv_bytes: int = 1 << 24, seed: int = 0, **options: Any) -> Any:
        import torch

        from rollout.embedded.core import EngineCore
        from rollout.embedded.kv_cache import KVCache
        from rollout.embedded.model import EmbeddedModel
        from rollout.embedded.model_config import EmbeddedModelConfig
        from rollout.embedded.model_weights import ModelWeights
        from rollout.embedded.scheduler import Scheduler

        config = EmbeddedModelConfig.read(path)
        cache = KVCache(config, kv_bytes, torch.float32)
        model = EmbeddedModel(config, ModelWeights(path, config, torch.float32), config.max_position_embeddings)
        scheduler = Scheduler(max_running=max_running, max_prefill_tokens=64, cache=cache)
        return EngineCore(model, cache, scheduler, seed=seed, **options)

    return build


@pytest.fixture(scope="session")
def sequence_of() -> Callable[..., Any]:
    """Builds a Sequence from a prompt and sampling params."""

    def build(rid: str, prompt: list[int], *, stop_ids: frozenset[int] = frozenset(), **params: Any) -> Any:
        from rollout.embedded.sequence import SamplingParams, Sequence

        asked = {name: params.pop(name) for name in ("logprob_start", "cache_key") if name in params}
        sampling = SamplingParams.read({"temperature": 0.0, "max_new_tokens": 8, **params}, SHAPE["vocab_size"])
        return Sequence(rid, prompt, sampling, sampling.token_limit or 0, stop_ids, return_logprob=True, **asked)

    return build

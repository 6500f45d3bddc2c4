"""Continuous batching against transformers, one sequence at a time."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_model

EOS, VOCAB_SIZE = 1, 48

FAMILIES = {
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen2": {"tie_word_embeddings": False},
    "Llama": {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randint(1, 12))] for _ in range(count)]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    ids, logprobs = list(prompt), []
    for _ in range(num_tokens):
        row = model(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        ids.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return ids[len(prompt) :], logprobs


def run(core: Any) -> None:
    while core.has_work:
        core.step()


@pytest.mark.parametrize("family", FAMILIES)
def test_requests_that_join_midway_get_what_transformers_gives(family: str, tmp_path: Path, core_of, sequence_of):
    model = save_model(tmp_path, family, **FAMILIES[family])
    core = core_of(tmp_path, max_running=5)
    sequences = [sequence_of(f"{i}.", prompt, max_new_tokens=3 + 2 * i) for i, prompt in enumerate(prompts(9))]
    for sequence in sequences:
        core.add([sequence])
        core.step()
        core.step()
    run(core)
    for sequence in sequences:
        tokens, logprobs = greedy(model, sequence.prompt, sequence.limit)
        assert sequence.output_ids == tokens
        torch.testing.assert_close(sequence.output_logprobs, logprobs, atol=1e-5, rtol=0)
        assert sequence.finish_reason == {"type": "length", "length": sequence.limit}


def test_retract_and_swap_recompute_the_cache_with_the_new_weights(qwen3, core_of, sequence_of, tmp_path):
    path, _ = qwen3
    other = save_model(tmp_path, seed=7, head_dim=16, tie_word_embeddings=True)
    core = core_of(path, version="v1")
    sequence = sequence_of("a", prompts(1)[0], max_new_tokens=6)
    core.add([sequence])
    core.step()
    core.retract()
    core.swap_weights(core_of(tmp_path).model.weights, "v2")
    run(core)
    assert sequence.output_ids[2:] == greedy(other, sequence.prompt + sequence.output_ids[:2], 4)[0]
    assert sequence.version_spans == [("v1", 0, 2), ("v2", 2, 6)]


def test_a_small_cache_queues_instead_of_failing(qwen3, core_of, sequence_of):
    path, model = qwen3
    core = core_of(path, kv_bytes=core_of(path).cache.bytes_per_token * 64)
    sequences = [sequence_of(f"{i}.", prompt, max_new_tokens=12) for i, prompt in enumerate(prompts(6))]
    core.add(sequences)
    most = 0
    while core.has_work:
        core.step()
        most = max(most, len(core.scheduler.running))
    assert most <= 4
    assert all(sequence.output_ids == greedy(model, sequence.prompt, 12)[0] for sequence in sequences)

"""The sampler against a naive version and against the distribution it promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollout.embedded.sampling import adjust_logits, draw, keep_likely, sample
from rollout.embedded.sequence import SamplingParams


def naive_keep(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, mass = set(), 0.0
    for rank, token in enumerate(order):
        if (top_k > 0 and rank >= top_k) or mass > top_p or probabilities[token] < min_p * probabilities[order[0]]:
            break
        kept.add(token)
        mass += probabilities[token]
    return kept


@pytest.mark.parametrize("params", [{"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}, {"top_k": 7, "top_p": 0.8, "min_p": 0.05}])
def test_filters_keep_what_the_naive_version_keeps(params: dict[str, Any]):
    torch.manual_seed(0)
    probabilities = (torch.randn(20, 16) * 2).softmax(-1)
    sampling = SamplingParams.read(params, 16)
    kept = keep_likely(probabilities, [sampling] * 20)
    for before, after in zip(probabilities, kept, strict=True):
        expected = naive_keep(before.tolist(), sampling.top_k, sampling.top_p, sampling.min_p)
        assert set(after.nonzero()[:, 0].tolist()) == expected
        torch.testing.assert_close(after[list(expected)], before[list(expected)])


def test_draws_follow_the_distribution():
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2])
    generator = torch.Generator().manual_seed(0)
    tokens = draw(weights.expand(40_000, 4), torch.rand(40_000, dtype=torch.float64, generator=generator))
    frequency = torch.bincount(tokens, minlength=4) / 40_000
    assert frequency[1] == 0
    torch.testing.assert_close(frequency, weights, atol=0.01, rtol=0)


def test_the_ends_of_the_unit_interval_never_draw_a_removed_token():
    weights = torch.tensor([[0.0, 1.0, 2.0, 0.0]] * 2)
    assert draw(weights, torch.tensor([0.0, 1.0 - 2**-53], dtype=torch.float64)).tolist() == [1, 2]


def test_temperature_scales_the_distribution_and_greedy_rows_ignore_chance():
    logits = torch.tensor([[0.0, 1.0, 2.0]] * 3)
    temperature, greedy = torch.tensor([1.0, 0.5, 1.0]), torch.tensor([False, False, True])
    tokens, logprobs = sample(logits, temperature, greedy, torch.Generator().manual_seed(0), filtered={})
    torch.testing.assert_close(logprobs[1], (logits[1] / 0.5).log_softmax(-1))
    torch.testing.assert_close(logprobs[2], logits[2].log_softmax(-1))
    assert int(tokens[2]) == 2


def test_penalties_follow_their_formulas(sequence_of):
    sequence = sequence_of("a", [1], repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logit_bias={"3": 4.0})
    sequence.output_ids = [1, 2, 1]
    logits = torch.tensor([[1.0, 5.0, 0.5, 0.0]])
    adjust_logits(logits, [(0, 3, sequence)])
    # token 1: (5 - 0.5 * 2 - 0.25) / 2; token 2: 0.5 - 0.5 - 0.25 = -0.25, negative, so times 2
    torch.testing.assert_close(logits, torch.tensor([[1.0, 1.875, -0.5, 4.0]]))


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": 0, "temperature": 1e-5}, "top_k"),
        ({"min_new_tokens": 129}, "min_new_tokens"),
        ({"logit_bias": {"16": 1.0}}, "logit_bias"),
    ],
)
def test_a_value_out_of_range_is_named(params: dict[str, Any], word: str):
    with pytest.raises(ValueError, match=word):
        SamplingParams.read(params, 16)


def test_a_greedy_request_may_say_any_top_k_as_in_sglang():
    assert SamplingParams.read({"top_k": 0, "temperature": 0}, 16).is_greedy

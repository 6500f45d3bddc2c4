"""Logits to tokens and the logprobs of those tokens.

Legend: B rows, V vocabulary. The logprob of a token is log softmax((logits + adjustments) / temperature), before top-k,
top-p and min-p remove anything: what SGLang reports, and what a trainer can recompute.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollout.engine.sequence import Sequence


@dataclass
class SamplingRows:
    """Sampling parameters of B rows as tensors, and which slow paths any of them needs."""

    temperature: torch.Tensor  # float32 [B]
    greedy: torch.Tensor  # bool [B]
    top_k: torch.Tensor  # int64 [B], V where off
    top_p: torch.Tensor  # float32 [B]
    min_p: torch.Tensor  # float32 [B]
    all_temperature_one: bool
    any_greedy: bool
    any_filtered: bool
    seeded: list[tuple[int, int]]  # (row, seed)

    @classmethod
    def of(cls, sequences: list[Sequence], vocab_size: int) -> SamplingRows:
        """The rows of `sequences`, in order."""
        params = [sequence.sampling for sequence in sequences]
        return cls(
            temperature=torch.tensor([p.temperature for p in params]),
            greedy=torch.tensor([p.greedy for p in params]),
            top_k=torch.tensor([min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]),
            top_p=torch.tensor([p.top_p for p in params]),
            min_p=torch.tensor([p.min_p for p in params]),
            all_temperature_one=all(p.temperature == 1.0 for p in params),
            any_greedy=any(p.greedy for p in params),
            any_filtered=any(p.is_filtered for p in params),
            seeded=[(row, p.seed) for row, p in enumerate(params) if p.seed is not None],
        )


def sample(
    logits_BV: torch.Tensor, rows: SamplingRows, positions_B: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens int64 [B] and logprobs float32 [B, V] they were drawn from. Seeded rows draw from (seed, position) alone."""
    if not rows.all_temperature_one:
        logits_BV = logits_BV / rows.temperature[:, None]
    logprobs_BV = logits_BV.log_softmax(-1)
    probabilities_BV = logprobs_BV.exp()
    if rows.any_filtered:
        probabilities_BV = keep_likely(probabilities_BV, rows.top_k, rows.top_p, rows.min_p)
    uniform_B = torch.rand(len(logits_BV), dtype=torch.float64, generator=generator)
    for row, seed in rows.seeded:
        uniform_B[row] = _seeded_uniform(seed, int(positions_B[row]))
    tokens_B = draw(probabilities_BV, uniform_B)
    if rows.any_greedy:
        tokens_B = torch.where(rows.greedy, logits_BV.argmax(-1), tokens_B)
    return tokens_B, logprobs_BV


def draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling: token i with probability weights[i] / sum; `uniform_B` in [0, 1).

    One random number a row instead of one a token; float64 sums, so that a weight of 0 is never drawn.
    """
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1).clamp_(max=weights_BV.shape[-1] - 1)


def keep_likely(probabilities_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor, min_p_B: torch.Tensor) -> torch.Tensor:
    """Zero what top-k, top-p or min-p removes, each judged on the unfiltered distribution (SGLang's joint order)."""
    ordered, order = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    rank = torch.arange(ordered.shape[-1])
    removed = (rank >= top_k_B[:, None]) | (before > top_p_B[:, None]) | (ordered < ordered[:, :1] * min_p_B[:, None])
    return torch.zeros_like(ordered).scatter_(-1, order, ordered.masked_fill(removed, 0.0))


def adjust_logits(logits_BV: torch.Tensor, adjusted: list[tuple[int, int, Sequence]]) -> None:
    """Apply penalties, bias and the ban on early stops in place; `adjusted` lists (row, tokens generated, sequence)."""
    for row, num_generated, sequence in adjusted:
        sampling, logits_V = sequence.sampling, logits_BV[row]
        if sequence.token_counts is not None:
            _penalise(logits_V, sequence)
        for token, bias in sampling.logit_bias.items():
            logits_V[token] += bias
        if num_generated < sampling.min_new_tokens and sequence.stop_ids:
            logits_V[list(sequence.stop_ids)] = float("-inf")


def _penalise(logits_V: torch.Tensor, sequence: Sequence) -> None:
    """Penalties count generated tokens only, not the prompt, as in SGLang."""
    counts_V, sampling = sequence.token_counts, sequence.sampling
    if counts_V is None:
        return
    seen_V = counts_V > 0
    logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * seen_V
    scaled_V = torch.where(logits_V < 0, logits_V * sampling.repetition_penalty, logits_V / sampling.repetition_penalty)
    logits_V.copy_(torch.where(seen_V, scaled_V, logits_V))


def _seeded_uniform(seed: int, position: int) -> float:
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + position) % (1 << 63))
    return float(torch.rand(1, dtype=torch.float64, generator=generator))

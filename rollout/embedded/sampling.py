"""Logits to tokens and the logprobs of those tokens.

Legend: B rows, V vocabulary. The logprob of a token is log softmax((logits + adjustments) / temperature), before top-k,
top-p and min-p remove anything: what SGLang reports, and what a trainer can recompute.
"""

import torch

from rollout.embedded.sequence import SamplingParams, Sequence


def sample(
    logits_BV: torch.Tensor, temperature_B: torch.Tensor, greedy_B: torch.Tensor, generator: torch.Generator,
    filtered: dict[int, SamplingParams],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Tokens int64 [B] and logprobs float32 [B, V] they were drawn from. filtered: rows with top-k, top-p or min-p."""
    logprobs_BV = (logits_BV / temperature_B[:, None]).log_softmax(-1)
    weights_BV = logprobs_BV.exp()
    if filtered:
        index = list(filtered)
        weights_BV[index] = keep_likely(weights_BV[index], list(filtered.values()))
    uniform_B = torch.rand(len(logits_BV), dtype=torch.float64, generator=generator)
    drawn_B = draw(weights_BV, uniform_B)
    return torch.where(greedy_B, logits_BV.argmax(-1), drawn_B) if greedy_B.any() else drawn_B, logprobs_BV


def draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Inverse-transform sampling: token i with probability weights[i] / sum; `uniform_B` in [0, 1).

    One random number a row instead of one a token; float64 sums, so that a weight of 0 is never drawn.
    """
    cumulative_BV = weights_BV.cumsum(-1, dtype=torch.float64)
    threshold_B1 = (uniform_B * cumulative_BV[:, -1]).unsqueeze(-1)
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(-1).clamp_(max=weights_BV.shape[-1] - 1)


def keep_likely(probabilities_BV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Zero what top-k, top-p or min-p removes, each judged on the unfiltered distribution (SGLang's joint order)."""
    vocab_size = probabilities_BV.shape[-1]
    top_k_B1 = torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in params]).unsqueeze(1)
    top_p_B1 = torch.tensor([p.top_p for p in params]).unsqueeze(1)
    min_p_B1 = torch.tensor([p.min_p for p in params]).unsqueeze(1)
    ordered, order = probabilities_BV.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    removed = (torch.arange(vocab_size) >= top_k_B1) | (before > top_p_B1) | (ordered < ordered[:, :1] * min_p_B1)
    return torch.zeros_like(ordered).scatter_(-1, order, ordered.masked_fill(removed, 0.0))


def adjust_logits(logits_BV: torch.Tensor, adjusted: list[tuple[int, int, Sequence]]) -> None:
    """Apply penalties, bias and the ban on early stops in place; `adjusted` lists (row, tokens generated, sequence)."""
    for row, num_generated, sequence in adjusted:
        sampling, logits_V = sequence.sampling, logits_BV[row]
        if sampling.is_penalised and sequence.output_ids:
            generated = torch.tensor(sequence.output_ids, dtype=torch.int64)
            _penalise(logits_V, torch.bincount(generated, minlength=len(logits_V)), sampling)
        for token, bias in sampling.logit_bias.items():
            logits_V[token] += bias
        if num_generated < sampling.min_new_tokens and (stops := sequence.stop_ids | sequence.ignored_stop_ids):
            logits_V[list(stops)] = float("-inf")


def _penalise(logits_V: torch.Tensor, counts_V: torch.Tensor, sampling: SamplingParams) -> None:
    """Penalties count generated tokens only, not the prompt, as in SGLang."""
    seen_V = counts_V > 0
    logits_V -= sampling.frequency_penalty * counts_V + sampling.presence_penalty * seen_V
    scaled_V = torch.where(logits_V < 0, logits_V * sampling.repetition_penalty, logits_V / sampling.repetition_penalty)
    logits_V.copy_(torch.where(seen_V, scaled_V, logits_V))

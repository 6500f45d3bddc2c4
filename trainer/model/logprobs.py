"""Log-probability and entropy of each token from logits that are split over the vocabulary, with gradient.

t tokens   V vocabulary, of which each of tp ranks holds V / tp columns

Both are of softmax(logits / temperature), as engines report their logprobs: the same temperature in every pass, or ratios mean nothing.
Logits are in the model's dtype; what is computed of them in fp32 is computed for a chunk of tokens at a time, in both directions.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

LOWEST = -1e30
"""Of a rank that holds padding columns alone: far below any logit; still finite when divided by a small temperature."""
CHUNK_VALUES = 1 << 24
"""Logits of a chunk: 64 MiB in fp32, of which up to three copies exist at a time. Enough to fill a GPU."""


class LogProbEntropy(torch.autograd.Function):
    """Both in one pass, two messages between tensor-parallel ranks. It keeps the logits as they came and a few numbers of
    each token. exp(x) it keeps where the row is one chunk, else it makes it again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | None, group: Any, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, several = logits.shape[-1], group is not None and group.size() > 1
        first = group.rank() * width if several else 0
        rows = logits.reshape(-1, width)[:, : max(0, vocab_size - first)]  # padding columns are no tokens
        warmth = None if temperature is None else temperature.reshape(-1, 1)
        local = targets.reshape(-1, 1) - first
        mine, column = (local >= 0) & (local < rows.shape[1]), local.clamp(0, max(0, rows.shape[1] - 1))
        top = rows.amax(-1, keepdim=True).float() if rows.shape[1] else rows.new_full((len(rows), 1), LOWEST, dtype=torch.float32)
        if several:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        sums = top.new_zeros(3, len(rows))  # of exp(x), of x exp(x), x of the target
        for span in chunks(rows):
            x = scaled(rows[span], top[span], None if warmth is None else warmth[span])
            if x.shape[1]:
                sums[2, span] = x.gather(-1, column[span]).masked_fill_(~mine[span], 0.0).squeeze(-1)
            weights = x.exp()
            sums[0, span], sums[1, span] = weights.sum(-1), x.mul_(weights).sum(-1)
        kept = weights if rows.shape[1] and len(weights) == len(rows) else None
        if several:
            dist.all_reduce(sums, group=group)
        total, weighted, picked = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, kept, column, mine, top, total, entropy, warmth)
        ctx.num_columns = rows.shape[1]
        ctx.set_materialize_grads(False)
        return (picked - log_total).view(targets.shape), entropy.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        logits, kept, column, mine, top, total, entropy, warmth = ctx.saved_tensors
        of_logprob, of_entropy = (None if grad is None else grad.reshape(-1, 1) for grad in grads)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        rows, out = (x.view(-1, logits.shape[-1]) for x in (logits.contiguous(), grad))
        out[:, ctx.num_columns :] = 0.0
        rows, out = rows[:, : ctx.num_columns], out[:, : ctx.num_columns]
        # p = exp(x) / total, x = logits / temperature:  d logp / d x_i = [i == target] - p_i ;  d H / d x_i = -p_i (log p_i + H)
        for span in chunks(rows) if ctx.num_columns else ():
            x = kept
            if kept is None or of_entropy is not None:
                x = scaled(rows[span], top[span], None if warmth is None else warmth[span])
            weights = x.exp() if kept is None else kept
            slope = torch.zeros_like(top[span]) if of_logprob is None else -of_logprob[span]
            if of_entropy is not None:
                slope = x.add_((entropy - total.log())[span, None]).mul_(-of_entropy[span]).add_(slope)
            made = torch.mul(weights, slope.div_(total[span, None]), out=out[span] if out.dtype == torch.float32 else None)
            if of_logprob is not None:
                made.scatter_add_(-1, column[span], of_logprob[span] * mine[span])
            if warmth is not None:
                made.div_(warmth[span])
            if made.dtype != out.dtype:
                out[span] = made
        return grad, None, None, None, None


def chunks(rows: torch.Tensor) -> Iterator[slice]:
    """Spans of rows of about CHUNK_VALUES numbers."""
    size = max(1, CHUNK_VALUES // max(1, rows.shape[1]))
    return (slice(start, start + size) for start in range(0, len(rows), size))


def scaled(rows: torch.Tensor, top: torch.Tensor, warmth: torch.Tensor | None) -> torch.Tensor:
    """(rows - top) / temperature as a new tensor in fp32: the caller's logits stay."""
    x = rows.float() - top if rows.dtype == torch.float32 else rows.float().sub_(top)
    return x if warmth is None else x.div_(warmth)


def logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | None = None, *, vocab_size: int, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and the entropy of the distribution, both [..., t] f32, from logits [..., t, V / tp]
    divided by temperature [..., t] (None: 1).

    `group` holds the tensor-parallel ranks (None: the logits are whole); columns from `vocab_size` on are padding.
    """
    return LogProbEntropy.apply(logits, targets, temperature, group, vocab_size)

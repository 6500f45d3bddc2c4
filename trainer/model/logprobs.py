"""Log-probability and entropy of each token from hidden states and the output layer, split over the vocabulary, with gradient.

t tokens   h hidden size   V vocabulary; each of tp ranks holds V / tp columns of it

Both are of softmax(logits / temperature), as engines report their logprobs: the same temperature in every pass, or ratios mean nothing.
Logits of a long row never exist: they are made for a block of tokens at a time, in the model's dtype, and in the backward again. What is
computed of them in fp32 is computed for a chunk of a block.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

LOWEST = -1e30
"""Of a rank that holds padding columns alone: far below any logit; still finite when divided by a small temperature."""
BLOCK_VALUES = 1 << 28
"""Logits of a block: 512 MiB in bfloat16, 1,766 tokens of a vocabulary of 152,000, so that its products still fill a GPU."""
CHUNK_VALUES = 1 << 24
"""Logits of a chunk: 64 MiB in fp32; up to three copies exist at a time. Enough to fill a GPU."""
CPU_CHUNK_VALUES = 1 << 17
"""The same on a CPU: they stay in its cache from one operation to the next."""


class LogProbEntropy(torch.autograd.Function):
    """Both in one pass, two messages between tensor-parallel ranks. It keeps the hidden states and a few numbers of each token. Of a row
    that is one block it keeps the logits, and of up to CHUNK_VALUES of them exp(x) too; else it makes them again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: torch.Tensor | None,
        group: Any,
        vocab_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        several = group is not None and group.size() > 1
        first = group.rank() * len(weight) if several else 0
        rows, used = hidden.reshape(-1, hidden.shape[-1]), weight[: max(0, vocab_size - first)]  # padding columns are no tokens
        warmth = None if temperature is None else temperature.reshape(-1, 1)
        local = targets.reshape(-1, 1) - first
        mine, column = (local >= 0) & (local < len(used)), local.clamp(0, max(0, len(used) - 1))
        top = rows.new_full((len(rows), 1), LOWEST, dtype=torch.float32)
        sums = top.new_zeros(3, len(rows))  # of exp(x), of x exp(x), x of the target
        logits = rows.new_zeros(0)
        kept = top.new_empty(len(rows), len(used)) if len(rows) * len(used) <= CHUNK_VALUES else None
        for block, chunks in blocks(rows, len(used)):
            logits = rows[block] @ used.T
            for within, span in chunks:
                top[span] = logits[within].amax(-1, keepdim=True).float()
                x = scaled(logits[within], top[span], None if warmth is None else warmth[span])
                sums[2, span] = x.gather(-1, column[span]).masked_fill_(~mine[span], 0.0).squeeze(-1)
                weights = torch.exp(x, out=None if kept is None else kept[span])
                sums[0, span], sums[1, span] = weights.sum(-1), x.mul_(weights).sum(-1)
        if several:
            highest = top.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
            shift = scaled(top, highest, warmth).squeeze(-1)
            sums = torch.stack([sums[0], sums[1] + shift * sums[0], sums[2] + shift * mine.squeeze(-1)])
            sums[:2] *= shift.exp()
            kept = None if kept is None else kept * shift.exp()[:, None]
            top = highest
            dist.all_reduce(sums, group=group)
        total, weighted, picked = sums
        log_total = total.log()
        entropy = log_total - weighted / total
        logits_kept = logits if len(logits) == len(rows) else None
        ctx.save_for_backward(hidden, weight, logits_kept, kept, column, mine, top, total, entropy, warmth)
        ctx.num_columns = len(used)
        ctx.set_materialize_grads(False)
        return (picked - log_total).view(targets.shape), entropy.view(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        hidden, weight, logits_kept, kept, column, mine, top, total, entropy, warmth = ctx.saved_tensors
        of_logprob, of_entropy = (None if grad is None else grad.reshape(-1, 1) for grad in grads)
        rows, used = hidden.reshape(-1, hidden.shape[-1]), weight[: ctx.num_columns]
        grad_rows, grad_used = torch.zeros_like(rows), None
        # p = exp(x) / total, x = logits / temperature:  d logp / d x_i = [i == target] - p_i ;  d H / d x_i = -p_i (log p_i + H)
        for block, chunks in blocks(rows, len(used)):
            logits = rows[block] @ used.T if logits_kept is None else logits_kept
            out = torch.empty_like(logits)
            for within, span in chunks:
                x = top
                if kept is None or of_entropy is not None:
                    x = scaled(logits[within], top[span], None if warmth is None else warmth[span])
                weights = x.exp() if kept is None else kept[span]
                slope = torch.zeros_like(top[span]) if of_logprob is None else -of_logprob[span]
                if of_entropy is not None:
                    slope = x.add_((entropy - total.log())[span, None]).mul_(-of_entropy[span]).add_(slope)
                made = torch.mul(weights, slope.div_(total[span, None]), out=out[within] if out.dtype == torch.float32 else None)
                if of_logprob is not None:
                    made.scatter_add_(-1, column[span], of_logprob[span] * mine[span])
                if warmth is not None:
                    made.div_(warmth[span])
                if made.dtype != out.dtype:
                    out[within] = made
            grad_rows[block] = out @ used
            of_block = out.T @ rows[block]
            grad_used = of_block if grad_used is None else grad_used.float().add_(of_block)
        grad_weight = torch.zeros_like(weight) if grad_used is None else grad_used.to(weight.dtype)
        padding = len(weight) - len(grad_weight)
        return grad_rows.view(hidden.shape), F.pad(grad_weight, (0, 0, 0, padding)) if padding else grad_weight, None, None, None, None


def blocks(rows: torch.Tensor, width: int) -> Iterator[tuple[slice, list[tuple[slice, slice]]]]:
    """Spans of rows of about BLOCK_VALUES logits, and their chunks of about CHUNK_VALUES: each within its block, and in all rows."""
    if not width:
        return
    chunk = CHUNK_VALUES if rows.is_cuda else min(CHUNK_VALUES, CPU_CHUNK_VALUES)
    size, step = max(1, BLOCK_VALUES // width), max(1, chunk // width)
    for start in range(0, len(rows), size):
        stop = min(start + size, len(rows))
        chunks = [slice(at, min(at + step, stop)) for at in range(start, stop, step)]
        yield slice(start, stop), [(slice(span.start - start, span.stop - start), span) for span in chunks]


def scaled(rows: torch.Tensor, top: torch.Tensor, warmth: torch.Tensor | None) -> torch.Tensor:
    """(rows - top) / temperature as a new tensor in fp32: the caller's logits stay."""
    x = rows.float() - top if rows.dtype == torch.float32 else rows.float().sub_(top)
    return x if warmth is None else x.div_(warmth)


def logprobs_and_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None = None,
    *,
    vocab_size: int,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and the entropy of the distribution, both [..., t] f32, from hidden states [..., t, h] and the output layer's weight
    [V / tp, h], divided by temperature [..., t] (None: 1).

    `group` holds the tensor-parallel ranks (None: the weight is whole); rows of it from `vocab_size` on are padding. The gradient of the
    hidden states is that of this rank's part of the vocabulary.
    """
    return LogProbEntropy.apply(hidden, weight, targets, temperature, group, vocab_size)

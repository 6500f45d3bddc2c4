"""Log-probability and entropy of each token from logits that are split over the vocabulary, with gradient.

t tokens   V vocabulary, of which each of tp ranks holds V / tp columns

Both are of softmax(logits / temperature), as engines report their logprobs: the same temperature in every pass, or ratios mean nothing.
"""

from typing import Any

import torch
import torch.distributed as dist

MASKED = -1e30  # far below any logit; still finite when divided by a small temperature


class LogProbEntropy(torch.autograd.Function):
    """Both in one pass, two messages between tensor-parallel ranks, one softmax-sized tensor kept for the backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | None, group: Any, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width, several = logits.shape[-1], group is not None and group.size() > 1
        first = group.rank() * width if several else 0
        x = logits.float()
        if first + width > vocab_size:  # padding columns are no tokens
            x = x.clone()
            x[..., max(0, vocab_size - first) :] = MASKED
        top = x.amax(-1)
        if several:
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        x = x - top.unsqueeze(-1)  # a new tensor: the caller's logits stay
        if temperature is not None:
            x.div_(temperature.unsqueeze(-1))
        probabilities = x.exp()
        local = targets - first
        mine = (local >= 0) & (local < width)
        column = local.clamp(0, width - 1).unsqueeze(-1)
        picked = x.gather(-1, column).squeeze(-1).masked_fill(~mine, 0.0)
        weighted = torch.linalg.vecdot(probabilities, x)
        sums = torch.stack([probabilities.sum(-1), weighted, picked])
        if several:
            dist.all_reduce(sums, group=group)
        total, weighted, picked = sums
        log_total = total.log()
        probabilities.div_(total.unsqueeze(-1))
        entropy = log_total - weighted / total
        ctx.save_for_backward(probabilities, column, mine, entropy)
        ctx.dtype, ctx.temperature = logits.dtype, temperature
        ctx.set_materialize_grads(False)
        return picked - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        grad_logprob, grad_entropy = grads
        p, column, mine, entropy = ctx.saved_tensors
        # x = logits / temperature:  d logp / d x_i = [i == target] - p_i ;  d H / d x_i = -p_i (log p_i + H)
        grad = torch.zeros_like(p)
        if grad_logprob is not None:
            grad = p * -grad_logprob.unsqueeze(-1)
            grad.scatter_add_(-1, column, (grad_logprob * mine).unsqueeze(-1))
        if grad_entropy is not None:
            grad -= grad_entropy.unsqueeze(-1) * p * (p.clamp_min(1e-30).log() + entropy.unsqueeze(-1))
        if ctx.temperature is not None:
            grad.div_(ctx.temperature.unsqueeze(-1))
        return grad.to(ctx.dtype), None, None, None, None


def logprobs_and_entropy(
    logits: torch.Tensor, targets: torch.Tensor, temperature: torch.Tensor | None = None, *, vocab_size: int, group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(target) and the entropy of the distribution, both [..., t] f32, from logits [..., t, V / tp]
    divided by temperature [..., t] (None: 1).

    `group` holds the tensor-parallel ranks (None: the logits are whole); columns from `vocab_size` on are padding.
    """
    return LogProbEntropy.apply(logits, targets, temperature, group, vocab_size)

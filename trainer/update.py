"""One optimizer step on a batch, and the forward-only pass, in any layout of the ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slimebus.config.schema import AlgorithmConfig
from trainer import parallel
from trainer.algorithms import LOSSES
from trainer.algorithms.aggregation import masked_sum, token_mean
from trainer.algorithms.kl import k3
from trainer.algorithms.terms import TokenLoss, TokenTerms
from trainer.batch import TokenBatch
from trainer.logprobs import logprobs_and_entropy
from trainer.model import Model
from trainer.optimizer import clear_gradients
from trainer.packing import MicroBatch, RowRules, pack
from trainer.settings import trains_without_advantage


def row_rules(model: Model) -> RowRules:
    """What this run's layout asks of packed rows."""
    return RowRules(
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        sp_size=parallel_state.get_tensor_model_parallel_world_size() if model.settings.sequence_parallel else 1,
    )


def micro_batches(model: Model, batch: TokenBatch, samples: np.ndarray, max_tokens_per_gpu: int) -> list[MicroBatch]:
    """This rank's rows of the given samples."""
    return pack(
        batch,
        samples,
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        max_tokens=max_tokens_per_gpu,
        rules=row_rules(model),
        device=parallel.device(),
    )


def run_schedule(model: Model, rows: Sequence[MicroBatch], reduce: Any, *, forward_only: bool) -> list[Any]:
    """Run megatron's pipeline schedule; `reduce(row, logprobs, entropy)` makes of each row what the schedule wants or what is collected.

    Forward only: its values come back in order, on the last stage. Otherwise it returns (loss, report) and the reports come back.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def step(iterator: Any, module: Any) -> tuple[torch.Tensor, Any]:
        row = next(iterator)
        logits = module(row.tokens, row.positions, None, packed_seq_params=row.packed)

        def finish(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            return reduce(row, *logprobs_and_entropy(output, row.targets, vocab_size=model.vocab_size, group=group))

        return logits, finish

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(rows),
        model=model.module,
        num_microbatches=len(rows),
        seq_length=rows[0].tokens.shape[1] * row_rules(model).cp_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def is_reporting_rank() -> bool:
    """Whether this rank's values count in a sum over all ranks: one of each set of tensor-parallel ranks, on the last stage."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


@torch.no_grad()
def compute_logprobs(model: Model, batch: TokenBatch, max_tokens_per_gpu: int) -> np.ndarray:
    """log p(tokens[t] | tokens[:t]) of the current weights for the whole batch, [N] f32 on every rank; 0 at each first token."""
    rows = micro_batches(model, batch, np.arange(len(batch.ends)), max_tokens_per_gpu)
    collected = run_schedule(model, rows, lambda row, logprobs, entropy: logprobs, forward_only=True)
    flat = torch.zeros(len(batch.tokens), device=parallel.device())
    if is_reporting_rank():
        for row, logprobs in zip(rows, collected, strict=True):
            flat[row.source[row.is_real]] = logprobs[row.is_real]
    return parallel.sum_over_ranks(flat).cpu().numpy()


@dataclass(frozen=True, slots=True)
class Kept:
    """Which samples of a batch are trained."""

    samples: np.ndarray
    """Indices of the samples with a gradient."""
    num_tokens: int
    """Their trained tokens, over all ranks: the denominator of the loss."""
    zero_variance_groups: int
    """Groups whose advantages are all 0."""


def choose_samples(batch: TokenBatch, algorithm: AlgorithmConfig) -> Kept:
    """Leave out groups whose advantages are all 0, unless a KL or entropy term or SFT gives them a gradient."""
    has_signal = np.bincount(np.repeat(batch.group_of, batch.lengths), weights=(batch.advantages * batch.loss_mask) != 0) > 0
    zero_variance = 0 if algorithm.loss_type == "sft_loss" else int((~has_signal).sum())
    kept = np.ones(len(batch.ends), dtype=bool) if trains_without_advantage(algorithm) else has_signal[batch.group_of]
    trained = np.add.reduceat(batch.loss_mask, batch.starts)
    kept &= trained > 0
    return Kept(np.flatnonzero(kept), int(trained[kept].sum()), zero_variance)


def train_step(model: Model, optimizer: Any, batch: TokenBatch, algorithm: AlgorithmConfig, max_tokens_per_gpu: int) -> dict[str, float]:
    """One optimizer step on the whole batch (the same on every rank); metrics, the same on every rank.

    The loss is the mean over all trained tokens of the batch. A batch without signal makes no step: `updated` is 0.
    """
    kept = choose_samples(batch, algorithm)
    counts = {
        "samples": float(len(batch.ends)),
        "samples_trained": float(len(kept.samples)),
        "tokens": float(len(batch.tokens)),
        "tokens_trained": float(kept.num_tokens),
        "zero_variance_groups": float(kept.zero_variance_groups),
    }
    if kept.num_tokens == 0:
        return counts | {"updated": 0.0, "loss": 0.0, "grad_norm": 0.0}
    clear_gradients(model, optimizer)
    model.module.train()
    rows = micro_batches(model, batch, kept.samples, max_tokens_per_gpu)
    reports = run_schedule(model, rows, loss_of_row(batch, algorithm, kept.num_tokens, len(rows)), forward_only=False)
    updated, grad_norm, _ = optimizer.step()
    return counts | mean_report(reports, kept.num_tokens) | {"updated": float(updated), "grad_norm": float(grad_norm or 0.0)}


def loss_of_row(batch: TokenBatch, algorithm: AlgorithmConfig, num_tokens: int, num_rows: int) -> Any:
    """The loss function that the schedule calls for each row; it returns the scaled loss and the row's report."""
    sides = {
        name: torch.from_numpy(getattr(batch, name)).to(parallel.device())
        for name in ("old_logprobs", "rollout_logprobs", "reference_logprobs", "advantages")
    }
    compute = LOSSES[algorithm.loss_type]
    # the schedule divides by the number of rows and DDP by the data-parallel ranks (it undoes context parallelism itself)
    scale = num_rows * parallel_state.get_data_parallel_world_size()

    def reduce(row: MicroBatch, new_logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        entropy = entropy if algorithm.entropy_coef != 0.0 else entropy.detach()
        terms = TokenTerms(new_logprobs, entropy, **{name: row.side(flat) for name, flat in sides.items()})
        outcome = compute(terms, algorithm)
        loss = token_mean(outcome.loss, row.loss_mask, num_tokens)
        return loss * scale, report_of_row(row, terms, outcome, algorithm)  # the schedule divides the loss in place

    return reduce


@torch.no_grad()
def report_of_row(row: MicroBatch, terms: TokenTerms, outcome: TokenLoss, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """Sums over the row's trained tokens by metric name; names that start with `max_` are maxima."""
    values = {"loss": outcome.loss.detach(), "entropy": terms.entropy.detach(), **outcome.measures}
    report = {}
    if algorithm.loss_type != "sft_loss":
        new = terms.new_logprobs.detach()
        difference = torch.where(row.loss_mask > 0, (new - terms.rollout_logprobs).abs(), 0.0)
        values |= {"approx_kl": k3(terms.rollout_logprobs, new), "logprob_mismatch_mean": difference}
        report["logprob_mismatch_max"] = difference.max()
    return report | {name: masked_sum(value, row.loss_mask) for name, value in values.items()}


def mean_report(reports: Sequence[dict[str, torch.Tensor]], num_tokens: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks (maxima where the name ends in `_max`), the same on every rank."""
    names = shared_names(reports)
    sums, tops = torch.zeros(2, len(names), dtype=torch.float64, device=parallel.device())
    if is_reporting_rank():
        for report in reports:
            row = torch.stack([report[name] for name in names]).double()
            sums += row
            tops = torch.maximum(tops, row)
    parallel.sum_over_ranks(sums)
    parallel.max_over_ranks(tops)
    return {name: float(tops[i]) if name.endswith("_max") else float(sums[i]) / num_tokens for i, name in enumerate(names)}


def shared_names(reports: Sequence[dict[str, torch.Tensor]]) -> list[str]:
    """Metric names on every rank, also on pipeline stages that have no report."""
    mine = ",".join(sorted(reports[0])) if reports else ""
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return mine.split(",")
    gathered = parallel.gather_bytes(mine.encode(), parallel_state.get_pipeline_model_parallel_group())
    return gathered[-1].decode().split(",")

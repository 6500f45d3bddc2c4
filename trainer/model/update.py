"""One optimizer step on a part of a batch, and the forward-only pass, in any layout of the ranks."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slimebus.bus.errors import HookError
from trainer.batches.batch import Batch
from trainer.batches.packing import MicroBatch, RankLayout, pack
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.logprobs import logprobs_and_entropy
from trainer.model.optimizer import GradientCosine, clear_gradients, set_learning_rate, step_if_finite
from trainer.objective.aggregation import masked_sum
from trainer.objective.kl import k3
from trainer.objective.objective import Objective, named
from trainer.objective.plugin import TokenLoss
from trainer.objective.row import DeviceColumns, Row

log = logging.getLogger("trainer")

NO_STEP = {"loss": 0.0, "grad_norm": 0.0, "updated": 0.0, "nonfinite": 0.0}
"""The metrics of an optimizer step on nothing."""
OF_THE_BATCH = {"samples", "tokens", "zero_variance_groups"}
"""Counts that are the same in every pass over a batch."""
COUNTED = OF_THE_BATCH | {"samples_trained", "tokens_trained", "updated", "nonfinite"}


def rank_layout(model: Model) -> RankLayout:
    """This rank's place in the layout, for packing."""
    return RankLayout(
        dp_size=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        sp_size=parallel_state.get_tensor_model_parallel_world_size() if model.config.sequence_parallel else 1,
        device=parallel.device(),
        attention_tokens=attention_tokens(model.config),
    )


def attention_tokens(config: Any) -> float:
    """The length of a sequence with attention that costs as much as the matrices of a layer: of queries, keys, values, output, FFN."""
    width, groups = config.num_attention_heads * config.kv_channels, config.num_query_groups * config.kv_channels
    is_moe = config.num_moe_experts is not None
    ffn = config.moe_ffn_hidden_size * config.moe_router_topk if is_moe else config.ffn_hidden_size
    return float(config.hidden_size * (2 * width + 2 * groups + 3 * ffn) / width)


def run_schedule(model: Model, rows: Sequence[MicroBatch], reduce: Any, *, forward_only: bool) -> list[Any]:
    """Run megatron's pipeline schedule; `reduce(row, logprobs, entropy)`, of a value model `reduce(row, values)`, makes of each row what
    the schedule wants or what is collected.

    Forward only: its values come back in order, on the last stage. Otherwise it returns (loss, report) and the reports come back.
    """
    group = parallel_state.get_tensor_model_parallel_group()
    precision = {"fp32_output": False} if model.config.bf16 else {}  # hidden states stay in the model's dtype

    def step(iterator: Any, module: Any) -> tuple[torch.Tensor, Any]:
        row = next(iterator)
        made = module(row.tokens, row.positions, None, packed_seq_params=row.packed, **precision)

        def finish(output: torch.Tensor, non_loss_data: bool = False) -> Any:
            if model.role == "value":
                return reduce(row, output.squeeze(-1))
            found = logprobs_and_entropy(output, model.head, row.targets, row.temperature, vocab_size=model.vocab_size, group=group)
            return reduce(row, *found)

        return made, finish

    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(rows),
        model=model.module,
        num_microbatches=len(rows),
        seq_length=rows[0].tokens.shape[1] * rank_layout(model).cp_size,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


def is_reporting_rank() -> bool:
    """Whether this rank's values count in a sum over all ranks: one of each set of tensor-parallel ranks, on the last stage."""
    return parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0


@torch.no_grad()
def forward_pass(model: Model, batch: Batch, max_tokens_per_gpu: int) -> np.ndarray:
    """log p(tokens[t] | tokens[:t]) of the current weights for the whole batch, of a value model V(tokens[:t]): the value of what stands
    before the token; [N] f32 on every rank, 0 at each first token.
    """
    model.module.eval()
    rows = pack(batch, np.arange(batch.num_samples), max_tokens_per_gpu, rank_layout(model))
    collected = run_schedule(model, rows, lambda row, *made: made[0], forward_only=True)
    values = TokenValues(batch.num_tokens)
    if is_reporting_rank():
        for row, made in zip(rows, collected, strict=True):
            values.add(row, made, row.is_real)
    return values.of_all_ranks()


class TokenValues:
    """One value for each of N tokens, collected from the rows of all ranks."""

    def __init__(self, num_tokens: int) -> None:
        self._flat = torch.zeros(num_tokens, device=parallel.device())

    def add(self, row: MicroBatch, values: torch.Tensor, where: torch.Tensor) -> None:
        """Those of a row, [1, t], where `where` is not 0; on ranks that report."""
        self._flat.index_add_(0, row.source.reshape(-1), torch.where(where > 0, values, 0.0).reshape(-1).float())

    def of_all_ranks(self) -> np.ndarray:
        """[N] f32, the same on every rank; 0 where none was added."""
        dist.all_reduce(self._flat)
        return self._flat.cpu().numpy()


def choose_samples(part: Batch, objective: Objective) -> tuple[np.ndarray, dict[str, float]]:
    """Indices of the samples that have a gradient, and counts for the metrics.

    Groups with advantages of 0 have none, unless a KL or entropy term or the algorithm gives them one.
    """
    trained, has_signal = part.sample_sums(np.ones(part.num_tokens)), part.has_signal
    kept = (trained > 0) & (objective.trains_without_advantage | has_signal[part.group_of])
    counts = {
        "samples": part.num_samples,
        "samples_trained": kept.sum(),
        "tokens": part.num_tokens,
        "tokens_trained": trained[kept].sum(),
        "zero_variance_groups": 0 if objective.algorithm.is_supervised else (~has_signal).sum(),
    }
    return np.flatnonzero(kept), {name: float(count) for name, count in counts.items()}


def compute_gradient(
    model: Model, optimizer: Any, part: Batch, max_tokens_per_gpu: int, loss_of_rows: Callable[[int, int], Any]
) -> dict[str, float]:
    """The gradient of the loss over all of `part`, which has its column `loss_weight`; the metrics of the rows, the same on every rank.

    loss_of_rows: from the number of trained tokens and that of rows to what `run_schedule` is given.
    """
    num_tokens = int(np.count_nonzero(part["loss_mask"]))
    clear_gradients(model, optimizer)
    model.module.train()
    rows = pack(part, np.arange(part.num_samples), max_tokens_per_gpu, rank_layout(model))
    return mean_report(run_schedule(model, rows, loss_of_rows(num_tokens, len(rows)), forward_only=False), num_tokens)


def apply_gradient(
    optimizer: Any, measures: dict[str, float], lr: float, num_samples: int, cosine: GradientCosine | None = None
) -> dict[str, float]:
    """One optimizer step at this learning rate; the metrics, the same on every rank.

    Where the loss or the gradient is not finite no step is made: `updated` is 0, `nonfinite` 1; metrics that are not finite are left out.
    """
    set_learning_rate(optimizer, lr)
    updated, grad_norm = step_if_finite(optimizer, measures["loss"], cosine)
    measures |= {"grad_norm": grad_norm, "lr": lr}
    if updated:
        return measures | (cosine.metrics if cosine else {}) | {"updated": 1.0, "nonfinite": 0.0}
    log.warning("no optimizer step: loss %s, gradient norm %s over %d samples", measures["loss"], grad_norm, num_samples)
    return {name: value for name, value in measures.items() if math.isfinite(value)} | {"updated": 0.0, "nonfinite": 1.0}


def merged_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The metrics of a batch from those of its optimizer steps: sums of what is counted, the largest of what ends in `_max`, and of all
    else the mean, weighted by trained tokens.
    """
    merged = {}
    for name in dict.fromkeys(name for metrics in steps for name in metrics):
        values, weights = zip(*((metrics[name], metrics["tokens_trained"]) for metrics in steps if name in metrics), strict=True)
        if name in COUNTED:
            merged[name] = sum(values)
        else:
            merged[name] = float(max(values) if name.endswith("_max") else np.average(values, weights=weights if any(weights) else None))
    return merged


def loss_scale(num_rows: int) -> int:
    """The schedule divides by the number of rows and DDP by the data-parallel ranks (it undoes context parallelism itself)."""
    return num_rows * int(parallel_state.get_data_parallel_world_size())


def loss_of_row(part: Batch, num_tokens: int, num_rows: int, objective: Objective, values: TokenValues) -> Any:
    """The loss function that the schedule calls for each row; it returns the scaled loss and the row's report. values: get new_logprobs."""
    columns, old = DeviceColumns(part, parallel.device()), objective.old_column(part)
    has_context = parallel_state.get_context_parallel_world_size() > 1
    cp_group = parallel_state.get_context_parallel_group() if has_context else None
    scale = loss_scale(num_rows)
    names = set[str]()

    def reduce(micro: MicroBatch, new_logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        row = Row(micro, columns, new_logprobs, entropy, old=old, cp_group=cp_group)
        if is_reporting_rank():
            values.add(micro, new_logprobs.detach(), micro.loss_mask)
        outcome = objective.loss(row)
        if (names or outcome.measures.keys()) != outcome.measures.keys():
            plugins = ", ".join(named(plugin) for plugin in objective.plugins)
            differ = f"the measures of one row are {sorted(names)}, of another {sorted(outcome.measures)}"
            raise HookError(f"{plugins}: {differ}; expected the same")
        names.update(outcome.measures)
        loss = masked_sum(outcome.loss * row["loss_weight"], row.loss_mask)
        report = report_of_row(row, outcome, compares=not objective.algorithm.is_supervised)
        return loss * scale, {"loss": loss.detach() * num_tokens, **report}  # the schedule divides the loss in place

    return reduce


@torch.no_grad()
def report_of_row(row: Row, outcome: TokenLoss, *, compares: bool) -> dict[str, torch.Tensor]:
    """Sums over the row's trained tokens by metric name; of names that end in `_max` the maxima. compares: with the sampler's logprobs."""
    values = {"entropy": row.entropy.detach(), **outcome.measures}
    if compares:
        new = row.new_logprobs.detach()
        difference = (new - row.rollout_logprobs).abs()
        values |= {"approx_kl": k3(row.rollout_logprobs, new), "logprob_mismatch_mean": difference, "logprob_mismatch_max": difference}
    return {
        name: torch.where(row.loss_mask > 0, value, 0.0).max() if name.endswith("_max") else masked_sum(value, row.loss_mask)
        for name, value in values.items()
    }


def mean_report(reports: Sequence[dict[str, torch.Tensor]], num_tokens: int) -> dict[str, float]:
    """Means over the trained tokens of all ranks (maxima where the name ends in `_max`), the same on every rank."""
    names, rows = list[str](), list[list[float]]()
    if is_reporting_rank():
        names = sorted(reports[0])
        rows = torch.stack([torch.stack([report[name] for name in names]).double() for report in reports]).tolist()
    of_ranks = parallel.gather((names, rows), tuple[list[str], list[list[float]]])
    names = max(theirs for theirs, _ in of_ranks)  # the same on each reporting rank, none on the others
    columns = np.array([row for _, rows in of_ranks for row in rows]).T
    return {
        name: float(column.max() if name.endswith("_max") else column.sum() / num_tokens)
        for name, column in zip(names, columns, strict=True)
    }

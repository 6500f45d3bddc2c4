"""One optimizer step of a value model on a part of a batch, and its forward-only pass, in any layout of the ranks.

Entry t of `values` and `returns` belongs to tokens[t] given tokens[:t]: the value of what stands before the token, as with its logprob.
"""

import logging
import math
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from trainer.batches.batch import Batch
from trainer.batches.packing import MicroBatch, pack
from trainer.model import parallel
from trainer.model.gpt import Model
from trainer.model.optimizer import clear_gradients, set_learning_rate, step_if_finite
from trainer.model.update import TokenValues, is_reporting_rank, mean_report, rank_layout, run_schedule
from trainer.objective.aggregation import masked_sum
from trainer.objective.row import DeviceColumns
from trainer.objective.value_loss import value_loss

log = logging.getLogger("critic")


@torch.no_grad()
def compute_values(model: Model, batch: Batch, max_tokens_per_gpu: int) -> np.ndarray:
    """V(tokens[:t]) of the current weights for the whole batch, [N] f32 on every rank; 0 at each first token."""
    model.module.eval()
    rows = pack(batch, np.arange(batch.num_samples), max_tokens_per_gpu, rank_layout(model))
    collected = run_schedule(model, rows, lambda row, values: values, forward_only=True)
    found = TokenValues(batch.num_tokens)
    if is_reporting_rank():
        for row, values in zip(rows, collected, strict=True):
            found.add(row, values, row.is_real)
    return found.of_all_ranks()


def value_step(model: Model, optimizer: Any, part: Batch, *, value_clip: float, max_tokens_per_gpu: int, lr: float) -> dict[str, float]:
    """One optimizer step on all of `part`, which has the columns `values` (from when it came), `returns` and `loss_weight`; metrics.

    Where the loss or the gradient is not finite no step is made: `updated` is 0, `nonfinite` 1; metrics that are not finite are left out.
    """
    num_tokens = int(np.count_nonzero(part["loss_mask"]))
    clear_gradients(model, optimizer)
    model.module.train()
    rows = pack(part, np.arange(part.num_samples), max_tokens_per_gpu, rank_layout(model))
    reports = run_schedule(model, rows, _loss_of_row(part, num_tokens, len(rows), value_clip), forward_only=False)
    measures = mean_report(reports, num_tokens)
    set_learning_rate(optimizer, lr)
    updated, grad_norm = step_if_finite(optimizer, measures["loss"])
    measures |= {"grad_norm": grad_norm, "lr": lr}
    if updated:
        return measures | {"updated": 1.0, "nonfinite": 0.0}
    log.warning("no optimizer step: loss %s, gradient norm %s over %d samples", measures["loss"], grad_norm, part.num_samples)
    return {name: value for name, value in measures.items() if math.isfinite(value)} | {"updated": 0.0, "nonfinite": 1.0}


def _loss_of_row(part: Batch, num_tokens: int, num_rows: int, value_clip: float) -> Any:
    columns = DeviceColumns(part, parallel.device())
    # as of the policy: the schedule divides by the number of rows and DDP by the data-parallel ranks
    scale = num_rows * parallel_state.get_data_parallel_world_size()

    def reduce(micro: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def at(name: str) -> torch.Tensor:
            return columns.at(name, micro.source, micro.sample).masked_fill(micro.loss_mask == 0, 0.0)

        per_token, clipped = value_loss(values, at("values"), at("returns"), value_clip)
        loss = masked_sum(per_token * at("loss_weight"), micro.loss_mask)
        report = {"loss": loss.detach() * num_tokens, "value_clipfrac": masked_sum(clipped, micro.loss_mask)}
        return loss * scale, report

    return reduce

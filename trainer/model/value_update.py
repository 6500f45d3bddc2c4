"""The loss of a value model on a packed row.

Entry t of `values` and `returns` belongs to tokens[t] given tokens[:t]: the value of what stands before the token, as with its logprob.
"""

from typing import Any

import torch

from trainer.batches.batch import Batch
from trainer.batches.packing import MicroBatch
from trainer.model import parallel
from trainer.model.update import loss_scale
from trainer.objective.aggregation import masked_sum
from trainer.objective.row import DeviceColumns


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2 per token, and where the clip took the gradient away.

    Baselines' PPO2; Engstrom et al., "Implementation Matters in Deep Policy Gradients" (2020), section 3. slime leaves out the half.
    """
    near = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free, bound = (values - returns).square(), (near - returns).square()
    return 0.5 * torch.maximum(free, bound), (bound > free).float()


def loss_of_values(part: Batch, num_tokens: int, num_rows: int, value_clip: float) -> Any:
    """As update.loss_of_row; `part` has the columns `values` (from when it came), `returns` and `loss_weight`."""
    columns, scale = DeviceColumns(part, parallel.device()), loss_scale(num_rows)

    def reduce(micro: MicroBatch, values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        def at(name: str) -> torch.Tensor:
            return columns.at(name, micro.source, micro.sample).masked_fill(micro.loss_mask == 0, 0.0)

        per_token, clipped = value_loss(values, at("values"), at("returns"), value_clip)
        loss = masked_sum(per_token * at("loss_weight"), micro.loss_mask)
        report = {"loss": loss.detach() * num_tokens, "value_clipfrac": masked_sum(clipped, micro.loss_mask)}
        return loss * scale, report

    return reduce

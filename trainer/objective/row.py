"""A packed row as a loss sees it: the columns of the batch at each token, and sums over sequences.

t tokens of this rank's part of the row   n sequences of the row
"""

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from slimebus.bus.errors import DataError
from trainer.batches.batch import Batch
from trainer.batches.on_device import on_device

if TYPE_CHECKING:  # packing imports megatron, which no check of a config should
    from trainer.batches.packing import MicroBatch


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class DeviceColumns:
    """The columns of a batch as tensors on a device, each moved when it is first read."""

    def __init__(self, batch: Batch, device: torch.device | None) -> None:
        self.batch, self.device = batch, device
        self._tensors: dict[str, torch.Tensor] = {}
        self.group_of = on_device(batch.group_of, device)

    def tensor(self, name: str) -> torch.Tensor:
        """The column in its own scope; doubles become floats."""
        if name not in self._tensors:
            values = self.batch[name]
            self._tensors[name] = on_device(values.astype(np.float32) if values.dtype == np.float64 else values, self.device)
        return self._tensors[name]

    def at(self, name: str, source: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        """The entries of the tokens of these indices, which are of these samples."""
        scope = self.batch.column(name).scope
        if scope == "row":
            raise DataError(f"column {name!r} has rows of its own, so it cannot be read by token")
        return self.tensor(name)[source if scope == "token" else sample if scope == "sample" else self.group_of[sample]]


class Row:
    """Everything known of each token of a row, all [1, t] (or [1, t, ...]); columns of floats are 0 where the mask is 0.

    row["advantages"], row["lag"], row["reward"], ...: any column of the batch, those of `prepare` among them, at each token; what a sample
    or a group has, each of its tokens has.
    """

    def __init__(
        self,
        micro: "MicroBatch",
        columns: DeviceColumns,
        new_logprobs: torch.Tensor,
        entropy: torch.Tensor,
        *,
        old: str | None = None,
        cp_group: Any = None,
    ) -> None:
        """old: the column of old_logprobs; None: they are those of this very pass. cp_group: ranks that hold the rest of each sequence."""
        self.micro, self.columns, self.cp_group, self._old = micro, columns, cp_group, old
        self.new_logprobs = new_logprobs
        """Of the model being trained, with gradient."""
        self.entropy = entropy
        """Of the model being trained, with gradient."""
        self.loss_mask = micro.loss_mask
        """f32, 1 where the token is trained."""

    def __getitem__(self, name: str) -> torch.Tensor:
        values = self.columns.at(name, self.micro.source, self.micro.sample)
        if not values.is_floating_point():
            return values
        # 0 * NaN is NaN in a backward, so masking the loss alone would not do
        return values.masked_fill((self.loss_mask == 0).view(self.loss_mask.shape + (1,) * (values.dim() - 2)), 0.0)

    def __contains__(self, name: str) -> bool:
        return name in self.columns.batch

    @cached_property
    def old_logprobs(self) -> torch.Tensor:
        """What the ratio is taken against, no gradient: the sampler's, or the trainer's from before the batch's first optimizer step."""
        return self.new_logprobs.detach() if self._old is None else self[self._old]

    @cached_property
    def rollout_logprobs(self) -> torch.Tensor:
        """The sampler's own."""
        return self["rollout_logprobs"]

    @cached_property
    def advantages(self) -> torch.Tensor:
        """Of each token."""
        return self["advantages"]

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[1, t] from [1, t]: at each token the sum over the trained tokens of its sequence (sample), wherever they lie; with gradient."""
        sums = values.new_zeros(self.micro.num_sequences)
        sums = sums.index_add(0, self.micro.sequence.reshape(-1), torch.where(self.loss_mask > 0, values, 0.0).reshape(-1))
        if self.cp_group is not None and self.cp_group.size() > 1:
            sums = SumOverRanks.apply(sums, self.cp_group)
        return sums[self.micro.sequence]

    @cached_property
    def sequence_lengths(self) -> torch.Tensor:
        """At each token the number of trained tokens of its sequence, at least 1."""
        return self.sequence_sum(torch.ones_like(self.loss_mask)).clamp_min(1.0)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[1, t] from [1, t]: at each token the mean over the trained tokens of its sequence (sample); with gradient."""
        return self.sequence_sum(values) / self.sequence_lengths

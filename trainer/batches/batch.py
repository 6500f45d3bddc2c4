"""What a step trains on as flat arrays, the same on every rank, and what makes a sample unfit for it.

S samples   N tokens of all samples, one sample after the other   T tokens of one sample
Entry t of every array belongs to tokens[t]: rollout_logprobs[t] is log p(tokens[t] | tokens[:t]), loss_mask[t] = 1 where it is trained.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import msgspec
import numpy as np
import torch.distributed as dist
from safetensors.numpy import load, save

from slimebus.bus.errors import DataError
from slimebus.bus.samples import Sample
from slimebus.cli.config.schema import AlgorithmConfig
from trainer.algorithms import ADVANTAGES
from trainer.model.parallel import broadcast_bytes

LARGEST_LOGPROB = 0.05
"""What a log_softmax in bfloat16 may round up to; a larger one is no logprob."""
LEAST_LOGPROB = -1e4
"""Ratios and KL terms of larger ones stay finite; the least that an engine reports at temperature 0.01 is some -1,000."""


class Group(msgspec.Struct):
    """The samples of one attempt at a prompt that are trained; id names it in errors."""

    id: str
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A batch as flat arrays, each sample's tokens after those of the one before."""

    tokens: np.ndarray
    """[N] int32."""
    loss_mask: np.ndarray
    """[N] f32, 0 or 1; 0 at the first token of every sample, which has no context."""
    advantages: np.ndarray
    """[N] f32."""
    rollout_logprobs: np.ndarray
    """[N] f32."""
    ends: np.ndarray
    """[S] int64, where each sample ends in the flat arrays."""
    group_of: np.ndarray
    """[S] int64, index of each sample's group."""
    temperatures: np.ndarray
    """[S] f32, what the logits of each sample are divided by."""
    old_logprobs: np.ndarray
    """[N] f32; the rollout's until a forward pass recomputes them."""
    reference_logprobs: np.ndarray
    """[N] f32; 0 until a forward pass of the reference model fills them."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, [S]."""
        return np.diff(self.ends, prepend=0)

    @property
    def starts(self) -> np.ndarray:
        """Where each sample starts in the flat arrays, [S]."""
        return self.ends - self.lengths

    @property
    def num_groups(self) -> int:
        """Groups of the batch."""
        return int(self.group_of[-1]) + 1


def check_sample(sample: Sample, name: str, vocab_size: int, *, reads_logprobs: bool) -> None:
    """Raise DataError, with what was got and expected, for a sample of the bus that would spoil the model or end the trainer.

    Where loss_mask is 1 rollout_logprobs must be those of tokens that were sampled, if the loss reads them.
    """
    if len(sample.tokens) == 0:
        raise DataError(f"{name}: no tokens")
    outside = sample.tokens[(sample.tokens < 0) | (sample.tokens >= vocab_size)]
    if len(outside):
        raise DataError(
            f"{name}: token id {outside[0]} is outside the model's vocabulary of {vocab_size};"
            " the rollout's tokenizer and the trainer's model do not match"
        )
    if reads_logprobs:
        is_sound = (sample.rollout_logprobs >= LEAST_LOGPROB) & (sample.rollout_logprobs <= LARGEST_LOGPROB)
        wrong = np.flatnonzero((sample.loss_mask > 0) & ~is_sound)
        wrong = wrong[wrong > 0]
        if len(wrong):
            value = sample.rollout_logprobs[wrong[0]]
            raise DataError(f"{name}: rollout_logprobs[{wrong[0]}] is {value} ({len(wrong)} such); expected {LEAST_LOGPROB:g} to 0")


def advantages_of(group: Group, algorithm: AlgorithmConfig) -> np.ndarray:
    """Of each sample, [its samples] f32; each of the group's trajectories counts once, whatever the number of its samples."""
    rewards = np.array([sample.reward or 0.0 for sample in group.samples])
    trajectories = [i if sample.trajectory is None else sample.trajectory for i, sample in enumerate(group.samples)]
    weights = 1 / np.array([trajectories.count(trajectory) for trajectory in trajectories])
    return ADVANTAGES[algorithm.advantage_estimator](rewards, weights, std_normalization=algorithm.grpo_std_normalization)


def flatten(groups: Sequence[Group], algorithm: AlgorithmConfig) -> TokenBatch:
    """One TokenBatch from groups, at least one, with the advantages of their rewards. Under SFT temperatures are 1, whoever sampled."""
    advantages = np.concatenate([advantages_of(group, algorithm) for group in groups])
    samples = [sample for group in groups for sample in group.samples]
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    ends = np.cumsum(lengths)
    loss_mask = np.concatenate([sample.loss_mask for sample in samples]).astype(np.float32)
    loss_mask[ends - lengths] = 0.0
    rollout_logprobs = np.concatenate([sample.rollout_logprobs for sample in samples]).astype(np.float32)
    is_supervised = algorithm.loss_type == "sft_loss"
    return TokenBatch(
        tokens=np.concatenate([sample.tokens for sample in samples]).astype(np.int32),
        loss_mask=loss_mask,
        advantages=np.repeat(advantages, lengths),
        rollout_logprobs=rollout_logprobs,
        ends=ends,
        group_of=np.repeat(np.arange(len(groups)), [len(group.samples) for group in groups]),
        temperatures=np.array([1.0 if is_supervised else sample.temperature for sample in samples], dtype=np.float32),
        old_logprobs=rollout_logprobs,
        reference_logprobs=np.zeros_like(rollout_logprobs),
    )


def share(batch: TokenBatch | None) -> TokenBatch:
    """Rank 0's batch on every rank; the others give None."""
    if dist.get_world_size() == 1 and batch is not None:
        return batch
    return TokenBatch(**load(broadcast_bytes(save(asdict(batch)) if batch else None)))
